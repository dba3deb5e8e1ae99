// Questions about what to rent, and their answers as numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/planner/plan_program.h"

namespace ebb::plan_questions_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Questions : public PlanProgramTest {};

// 207 million parameters of 70 billion train: in 4 bits on one card of 80 GB, and in 16 bits with
// the base in RAM, which a full fine-tuning would not fit.
TEST_F(Questions, CanOneCardTrainLoraOfSeventyBillion) {
  const std::string question = "--model llama-3-70b --machine 1xh100 --lora-rank 16 --context 2048";
  const auto whole = Json(question);
  EXPECT_EQ(whole["model"]["trained_parameters"], 207'093'760);
  EXPECT_EQ(whole["chosen"]["parameters"], "cpu");
  EXPECT_GT(whole["chosen"]["bytes"]["cpu"], 140e9);
  EXPECT_LT(whole["chosen"]["bytes"]["cpu"], 170e9);
  const auto quantized = Json(question + " --quantized 4bit");
  ASSERT_TRUE(quantized["chosen"]["fits"]);
  EXPECT_EQ(quantized["chosen"]["parameters"], "device");
  EXPECT_EQ(quantized["chosen"]["states"], "device");
  const double bytes = quantized["chosen"]["bytes"]["device"];
  EXPECT_GT(bytes, 43e9);
  EXPECT_LT(bytes, 80e9);
  EXPECT_GT(quantized["chosen"]["tokens_per_second"], whole["chosen"]["tokens_per_second"]);
  const std::string printed = Run(question + " --quantized 4bit").printed;
  EXPECT_THAT(printed, HasSubstr("207.1 M of them train: LoRA of rank 16 on all-linear, a base of "
                                 "4 bits"));
  ExpectRefused("--model gpt2 --quantized 4bit", "--lora-rank");
  ExpectRefused("--model gpt2 --lora-modules q_proj", "--lora-rank");
  ExpectRefused("--model gpt2 --lora-rank 8 --lora-modules q_proj", "it has down_proj");
  ExpectRefused("--model gpt2 --trainable norm", "--lora-rank");
}

TEST_F(Questions, WhatIsTheFastestForABatchOfTokens) {
  const std::string question = "--model llama-2-7b --batch-tokens ";
  const auto json = Json(question + "2M");
  EXPECT_EQ(json["step_tokens"], 480 * 4096);  // 60 for a rank, because 61 is a prime
  for (const auto& answer : json["answers"]) {
    if (answer.contains("refused")) continue;
    EXPECT_EQ(answer["micro_batch_size"].get<int>() * answer["micro_batches"].get<int>(), 60);
  }
  const std::string printed = Run(question + "2M").printed;
  EXPECT_THAT(printed,
              HasSubstr("a step of all ranks: 480 sequences of 4096 tokens, 1,966,080 tokens; "
                        "60 of a rank cut better than\n  the 61 of 2,000,000 tokens"));
  EXPECT_EQ(Json(question + "1998848")["step_tokens"], 488 * 4096) << "61 for a rank";
  EXPECT_THAT(Run(question + "2M --batch 1").printed, HasSubstr("488 sequences of 4096 tokens"));
  EXPECT_THAT(printed, HasSubstr("micro-batches\n"));
  EXPECT_THAT(Run("--model llama-2-7b --machine 1xrtx4090").printed, HasSubstr("(--batch-tokens)"));
  ExpectRefused(question + "1000", "at least one for each of 8 ranks");
  ExpectRefused(question + "much", "such as 500000, 4M or 1e9");
  ExpectRefused(question + "4M --micro-batches 2", "--micro-batches");
  EXPECT_EQ(Json(question + "4M --batch 3")["step_tokens"], 41 * 3 * 8 * 4096)
      << "122.07 for a rank";
}

// All micro-batches in a round read parameters once. Their boundary activations leave the device.
TEST_F(Questions, WhichOrderOfMicroBatchesIsTheFastest) {
  const auto json = Json(
      "--model llama-2-13b --machine 1xrtx4090 --micro-batches 32 --stage 3 --offload-param nvme "
      "--offload-optimizer nvme --recompute");
  EXPECT_THAT(std::string(json["best_change"]["change"]), HasSubstr("micro_batches_per_round"));
  EXPECT_GT(json["best_change"]["tokens_per_second"],
            2 * json["chosen"]["tokens_per_second"].get<double>());
}

// 31 sequences would be tried one by one or all at once. The search also tries boundary activations
// on NVMe, and the starred answer uses the RAM that is free, so that no change is much faster.
TEST_F(Questions, TheStarHasTheFastestOrderOfMicroBatches) {
  for (const char* batch : {"--batch-tokens 128K", "--batch-tokens 262144", "--micro-batches 32"}) {
    const auto json = Json(absl::StrCat("--model llama-2-13b --machine 1xrtx4090 ", batch));
    const double speed = json["chosen"]["tokens_per_second"];
    EXPECT_GT(speed, 800) << batch;
    if (json["best_change"].is_null()) continue;
    const std::string change = json["best_change"]["change"];
    const bool trains_differently = change.find("differently") != std::string::npos;
    EXPECT_LT(json["best_change"]["tokens_per_second"], (trains_differently ? 4 : 1.02) * speed)
        << batch << ": " << change;
  }
}

// Nothing fits without other keys. With them, micro-batches of several sequences do.
TEST_F(Questions, TheBatchIsCutAgainWhereOtherKeysMakeRoom) {
  const auto json = Json(
      "--model llama-2-13b --machine 1xrtx4090 --batch-tokens 128K --layers 60 --context 1024");
  ASSERT_TRUE(json["chosen"]["fits"]);
  EXPECT_FALSE(json["chosen"]["keys"].empty());
  EXPECT_GT(json["chosen"]["micro_batch_size"], 1);
}

TEST_F(Questions, HowLongDoesItTakeAndWhatDoesItCost) {
  const std::string question = "--model llama-2-7b --ranks 16 --tokens 1e9 --price 24";
  const auto json = Json(question);
  const double hours = 1e9 / json["chosen"]["tokens_per_second"].get<double>() / 3600;
  EXPECT_NEAR(json["chosen"]["hours"], hours, 1e-9 * hours);
  EXPECT_NEAR(json["chosen"]["price"], 2 * 24 * hours, 1e-6 * hours);
  EXPECT_EQ(json["hosts"], 2);
  EXPECT_EQ(json["chosen"]["bytes_of_host"]["cpu"],
            8 * json["chosen"]["bytes"]["cpu"].get<int64_t>());
  EXPECT_THAT(Run(question).printed, HasSubstr("10^9 tokens take "));
  EXPECT_THAT(Run(question).printed, HasSubstr("24 an hour for each of 2 hosts"));
  ExpectRefused("--model gpt2 --price 24", "--tokens");
  const auto offers = Json("--model gpt2 --compare 8xh100=24 --tokens 5e9")["offers"];
  EXPECT_NEAR(offers[0]["price"].get<double>(), 5 * offers[0]["price_of_1e9_tokens"].get<double>(),
              1e-3);
  EXPECT_GT(offers[0]["hours"], 0);
}

// The line of a machine has the reason that the machine alone has as its error.
TEST_F(Questions, WhyDoesAMachineNotTrainIt) {
  const std::string reason = "they must be at least one for each of 8 ranks",
                    few = "--model gpt2 --batch-tokens 4K",
                    printed = Run(few + " --compare 8xh100=24 1xh100=3").printed;
  ExpectRefused(few, reason);
  EXPECT_THAT(printed, HasSubstr("8xh100         4 sequences of 1024 tokens a step: " + reason));
  EXPECT_THAT(printed, HasSubstr("* 1xh100 "));
  EXPECT_THAT(std::string(Json(few + " --compare 8xh100=24")["offers"][0]["lacks"]),
              HasSubstr(reason));
  EXPECT_THAT(Run("--model llama-3-405b --batch-tokens 8K --compare 1xrtx3090 2xrtx3090").printed,
              HasSubstr("does not fit on any number of hosts"));
}

// A drive of 2 TB that allows 1,200 TB of writes.
TEST_F(Questions, HowLongDoDisksLast) {
  const auto json = Json(
      "--model llama-2-13b --machine 1xrtx4090 --stage 3 --offload-param nvme "
      "--offload-optimizer nvme --recompute");
  const double of_day = json["chosen"]["disk_bytes_written_a_day_of_host"];
  EXPECT_NEAR(json["chosen"]["days_of_disks"], 1200e12 / of_day, 1e-6 * 1200e12 / of_day);
  EXPECT_THAT(Run("--model llama-2-13b --machine 1xrtx4090 --stage 3 --offload-param nvme "
                  "--offload-optimizer nvme --recompute")
                  .printed,
              HasSubstr("times their capacity; they last "));
}

TEST_F(Questions, HowDoesMyMachineDo) {
  for (const char* machine : {"4xrtx4090", "1xb200", "2xl40s", "8xa100-40", "3xa6000", "1xrtx3090",
                              "2xrtx5090", "16xh200"})
    EXPECT_EQ(Run(absl::StrCat("--model gpt2 --machine ", machine)).code, 0) << machine;
  const auto four = Json("--model gpt2 --machine 4xrtx4090");
  EXPECT_EQ(four["ranks"], 4);
  EXPECT_EQ(four["machine"]["ram"], int64_t{4 * 62} << 30);
  EXPECT_EQ(Json("--model gpt2 --machine 16xh100")["hosts"], 2);
  ExpectRefused("--model gpt2 --machine 4xrtx409", "did you mean 4xrtx4090");
  ExpectRefused("--model gpt2 --machine 16xrtx4090", "a host has at most 8");
  ExpectRefused("--model gpt2 --machine 0xh100", "from 1 to");
  // A quarter of a host has a quarter of its RAM, unless all is given.
  const auto part = Json("--model gpt2 --ranks 2"), named = Json("--model gpt2 --machine 2xh100"),
             all = Json("--model gpt2 --ranks 2 --whole-host");
  EXPECT_EQ(part["chosen"]["room"]["cpu"], named["chosen"]["room"]["cpu"]);
  EXPECT_GT(all["chosen"]["room"]["cpu"], 3.9 * part["chosen"]["room"]["cpu"].get<double>());
  EXPECT_EQ(all["chosen"]["room"]["nvme"], 4 * part["chosen"]["room"]["nvme"].get<int64_t>());
  EXPECT_THAT(Run("--model gpt2 --ranks 12").printed,
              HasSubstr("12 ranks do not fill 2 hosts of 8: the last has 4"));
  EXPECT_EQ(Json("--model gpt2 --ranks 12")["warnings"].size(), 1u);
  const auto shown = nlohmann::json::parse(Run("--show-machine --machine 1xl40s").printed);
  EXPECT_THAT(std::string(shown["sources"]["gpu_teraflops"]), HasSubstr("llmq"));
}

TEST_F(Questions, IsTheSpeedBelievable) {
  const std::string printed = Run("--published-runs").printed;
  EXPECT_THAT(printed, HasSubstr("torchtitan, Llama 3 8 B, 8 H100, compiled"));
  EXPECT_THAT(printed, HasSubstr("rate of: fms-fsdp, README, 13 B, 96 H100"));
}

TEST_F(Questions, WhoseKernelsAreSimulated) {
  const std::string question = "--model llama-3-8b";
  EXPECT_THAT(Run(question).printed, HasSubstr("of a GPU's peak (--efficiency), as llm-foundry"));
  const auto half = Json(question + " --efficiency 0.5");
  EXPECT_NEAR(half["machine"]["gpu_teraflops"], 0.5 * 989, 1e-6);
  const std::string own = Write("own.json", R"({"gpus": 1, "gpu_memory": "40GiB",
      "gpu_teraflops": 50, "gpu_memory_gb_s": 500, "pcie_gb_s": 20, "ram": "64GiB", "ram_gb_s": 50,
      "cores": 8})");
  ExpectRefused("--model gpt2 --efficiency 0.5 --machine " + own, "gpu_peak_teraflops");
}

// Its matrices, all but 4% of this model, have one state in fp32.
TEST_F(Questions, WhatDoesMuonNeed) {
  const auto states = [&](const std::string& type) {
    const std::string file = Write(type + ".json", R"({"train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": true}, "zero_optimization": {"stage": 1},
        "optimizer": {"type": ")" + type + R"(", "params": {"lr": 0.001}}})");
    const auto json = Json("--model llama-2-7b --config " + file);
    return json["chosen"]["classes"]["device"]["optimizer"].get<double>();
  };
  EXPECT_NEAR(states("AdamW"), 8 * 6.738e9 / 8, 1e-3 * 6.738e9);
  EXPECT_NEAR(states("Muon") / states("AdamW"), 0.52, 0.01);
}

// A file whose configuration does not fit gets the keys of the fastest of the table that does.
TEST_F(Questions, WhatMakesAFileFit) {
  const auto json = Json("--model llama-3-8b --machine rtx4090-64gb --config " +
                         Write("adam.json", R"({"bf16": {"enabled": true}})"));
  EXPECT_FALSE(json["chosen"]["fits"]);
  double most = 0;
  const nlohmann::json* fastest = nullptr;
  for (const auto& answer : json["answers"]) {
    if (const double speed = answer.value("tokens_per_second", 0.0); speed > 1.005 * most)
      most = speed, fastest = &answer;
  }
  ASSERT_NE(fastest, nullptr);
  EXPECT_THAT(std::string(json["remedy"]),
              HasSubstr(absl::StrCat("stage ", (*fastest)["stage"].get<int>(), ", ")));
}

// A parameter takes 2 bytes, 2 of its master and 2.03 of moments of 8 bits. That trains
// differently, so it is offered, not chosen.
TEST_F(Questions, EightBillionTrainInSixtyFourGigabytesOfRam) {
  const std::string question = "--model llama-3-8b --machine rtx4090-64gb";
  const auto json = Json(question);
  EXPECT_EQ(json["optimizer_states"], "fp32");
  EXPECT_EQ(json["chosen"]["states"], "nvme");
  EXPECT_FALSE(json.contains("answers_with_small_states"));
  const auto& answer = json["small_states"]["answer"];
  EXPECT_TRUE(answer["fits"]);
  EXPECT_EQ(answer["bytes"]["nvme"], 0);
  const double of_parameter = answer["bytes"]["cpu"].get<double>() / 8.03e9;
  EXPECT_GT(of_parameter, 6.0);
  EXPECT_LT(of_parameter, 6.1);
  EXPECT_GT(answer["tokens_per_second"], 8 * json["chosen"]["tokens_per_second"].get<double>());
  const auto keys = nlohmann::json::parse(std::string(json["small_states"]["change"]));
  EXPECT_EQ(keys["optimizer"]["params"]["states"], "8bit");
  EXPECT_EQ(keys["gradient_clipping"], 0);
  EXPECT_EQ(keys["ebb"]["split_master"], true);
}

// The flag chooses them. The file that it writes has the same answer.
TEST_F(Questions, SmallStatesAreChosenWhereTheyAreAskedFor) {
  const std::string question = "--model gpt2-xl --machine 1xrtx4090";
  const std::string printed = Run(question).printed;
  EXPECT_THAT(printed, HasSubstr("A change of the training: {"));
  EXPECT_THAT(printed, HasSubstr("gradients are neither clipped"));
  EXPECT_THAT(Run(question + " --small-states --write " + Path("small.json")).printed,
              HasSubstr("optimizer states of 8 bits, split masters, gradients not clipped"));
  const auto written = Json(question + " --config " + Path("small.json"));
  EXPECT_EQ(written["optimizer_states"], "8bit");
  EXPECT_EQ(written["small_states"], nullptr);
  const auto file = nlohmann::json::parse(Read(Path("small.json")));
  EXPECT_EQ(file["ebb"]["check_overflow"], false);
  EXPECT_EQ(file["bf16"]["check_grad_overflow"], false);
}

// The title names another optimizer, and small states are those that it has.
TEST_F(Questions, WhichOptimizerTrains) {
  const auto file = [&](const char* name, const std::string& params) {
    return absl::StrCat(
        "--model gpt2 --machine 1xrtx4090 --config ",
        Write(absl::StrCat(name, ".json"),
              absl::StrCat(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
          "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
          "optimizer": {"type": ")",
                           name, R"(", "params": {"lr": 0.001)", params, "}}}")));
  };
  const auto bytes = [&](const std::string& asked) {
    return Json(asked)["chosen"]["classes"]["cpu"]["optimizer"].get<double>();
  };
  const std::string muon = file("Muon", ""), sgd = file("SGD", ""), lion = file("Lion", "");
  EXPECT_THAT(Run(file("AdamW", "")).printed, testing::Not(HasSubstr("AdamW\n")));
  EXPECT_THAT(Run(lion).printed, HasSubstr("optimizer Lion\n"));
  EXPECT_THAT(Run(lion + " --small-states").printed,
              HasSubstr("optimizer Lion, optimizer states of 8 bits, split masters"));
  EXPECT_THAT(Run(muon).printed, AllOf(HasSubstr("optimizer Muon\n"),
                                       HasSubstr("AdamW's states beside Muon's are rounded")));
  EXPECT_THAT(Run(muon + " --small-states").printed,
              HasSubstr("optimizer Muon, AdamW's states beside it of 8 bits, those of its matrices "
                        "in fp32, split masters"));
  // The momentum of the blocks' matrices stays in fp32. The rest is AdamW's, whose moments have 1 byte
  // of 4, and the scales of their blocks.
  const double momentum = 4.0 * 12 * 12 * 768 * 768, of_adam = bytes(muon) - momentum;
  EXPECT_GT(bytes(muon + " --small-states"), momentum + 0.25 * of_adam);
  EXPECT_LT(bytes(muon + " --small-states"), momentum + 0.26 * of_adam);
  const auto json = Json(sgd);
  EXPECT_EQ(json["optimizer"], "SGD");
  EXPECT_EQ(json["optimizer_states"], "none");
  EXPECT_EQ(json["small_states"]["changes_the_training"],
            "gradients are neither clipped nor checked for overflow");
  EXPECT_THAT(Run(sgd).printed, HasSubstr("optimizer SGD, no optimizer states\n"));
  EXPECT_THAT(Run(sgd + " --small-states").printed,
              AllOf(HasSubstr("optimizer SGD, no optimizer states, split masters, gradients not "
                              "clipped"),
                    testing::Not(HasSubstr("8 bits"))));
  EXPECT_EQ(Json(sgd + " --small-states")["small_states"], nullptr);
  EXPECT_THAT(Run(file("SGD", R"(, "momentum": 0.9)") + " --small-states").printed,
              HasSubstr("optimizer SGD, optimizer states of 8 bits"));
}

TEST_F(Questions, AllAlsoPrintsSmallStates) {
  const std::string question = "--model gpt2-xl --machine 1xrtx4090 --all";
  const auto json = Json(question);
  EXPECT_EQ(json["answers_with_small_states"].size(), json["answers"].size());
  EXPECT_EQ(json["optimizer_states"], "fp32");
  EXPECT_THAT(Run(question).printed, HasSubstr("With --small-states, which trains differently:"));
}

TEST_F(Questions, WhoseActivationsAreCounted) {
  const std::string question = "--model llama-3-8b --stage 3";
  const auto bytes = [&](const std::string& activations) {
    const auto json = Json(question + activations);
    return json["chosen"]["classes"]["device"]["workspace"].get<int64_t>();
  };
  const int64_t eager = bytes(" --activations torch"),
                compiled = bytes(" --activations torch-compiled");
  EXPECT_GT(eager, 1.2 * static_cast<double>(compiled));
  EXPECT_EQ(Json(question + " --activations torch-compiled")["activations_of"], "torch-compiled");
  EXPECT_THAT(Run(question + " --activations torch-compiled").printed,
              HasSubstr("activations as torch.compile keeps them"));
  ExpectRefused("--model gpt2 --activations torch-compiled", "a model like Llama");
}

TEST_F(Questions, WhatOtherProgramsDoIsSaidWhereItMatters) {
  EXPECT_THAT(Run("--model llama-3-70b --ranks 64").printed,
              testing::AllOf(HasSubstr("Other programs also cut such a model"),
                             HasSubstr("over tensor and pipeline ranks")));
  EXPECT_THAT(Run("--model llama-3-70b --ranks 64 --tensor 8").printed,
              HasSubstr("Other programs also cut such a model over pipeline ranks"));
  EXPECT_THAT(Run("--model qwen3-30b-a3b").printed, HasSubstr("over expert ranks"));
  EXPECT_THAT(Run("--model llama-2-7b").printed, testing::Not(HasSubstr("Other programs also")));
  ExpectRefused("--model gpt2 --pipeline-parallel 4", "plans data ranks");
}

TEST_F(Questions, WhatDoTensorRanksGive) {
  const auto one = Json("--model llama-3-8b --ranks 16"),
             eight = Json("--model llama-3-8b --ranks 16 --tensor 8 --write " + Path("t.json"));
  EXPECT_EQ(one["chosen"]["tensor"], 1);
  EXPECT_EQ(eight["chosen"]["tensor"], 8);
  EXPECT_EQ(eight["tensor_widths"], nlohmann::json::array({8}));
  EXPECT_EQ(eight["config"]["ebb"]["mesh"]["tensor"], 8);
  EXPECT_GT(eight["chosen"]["tensor_exchange_seconds"], 0);
  EXPECT_GE(eight["chosen"]["moved_bytes"]["peers"], eight["chosen"]["tensor_exchange_bytes"]);
  // The written file says it, too.
  const Ended again = Run("--model llama-3-8b --ranks 16 --config " + Path("t.json"));
  EXPECT_THAT(again.printed, HasSubstr("2 data ranks of 8 tensor ranks each"));
  EXPECT_THAT(again.printed, HasSubstr("as asked: 8 tensor ranks, stage"));
  EXPECT_THAT(Run("--model llama-3-8b --ranks 16 --tensor 8 --write " + Path("t.json")).printed,
              HasSubstr("the trainer must cut its layers over 8 tensor ranks itself"));
  // Rows that tensor ranks share take less memory.
  const char* const stage = "--model llama-3-8b --ranks 16 --tensor 8 --stage 1";
  EXPECT_LT(Json(absl::StrCat(stage, " --sequence-parallel"))["chosen"]["bytes"]["device"],
            Json(stage)["chosen"]["bytes"]["device"]);
}

// All widths train with the same tokens a step.
TEST_F(Questions, HowManyTensorRanksAreTheFastest) {
  const char* const model = "--model llama-2-13b --machine 8xrtx4090 --batch-tokens 64K";
  const auto all = Json(absl::StrCat(model, " --tensor auto"));
  EXPECT_EQ(all["tensor_widths"], nlohmann::json::array({1, 2, 4, 8}));
  EXPECT_EQ(all["step_tokens"], 65536);
  double most = 0;
  for (const auto& answer : all["answers"])
    most = std::max(most, answer.value("tokens_per_second", 0.0));
  EXPECT_GE(all["chosen"]["tokens_per_second"].get<double>() * 1.01, most);
  const int width = all["chosen"]["tensor"].get<int>();
  EXPECT_EQ(Json(absl::StrCat(model, " --tensor ", width))["chosen"]["tokens_per_second"],
            all["chosen"]["tokens_per_second"]);
  // Without a batch it is the one that data ranks alone have.
  EXPECT_EQ(Json("--model llama-2-7b --tensor auto --stage 3")["step_tokens"], 8 * 4096);
  EXPECT_THAT(Run("--model llama-2-7b --all").printed,
              HasSubstr("With tensor ranks, the fastest of each number for the same batch"));
}

// Headers say no layout: the config.json beside them does, and is of the same model.
TEST_F(Questions, HowFilesAreSharedByTensorRanks) {
  const std::string config = Write("config.json", R"({"model_type": "llama", "hidden_size": 64,
      "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
      "vocab_size": 100})");
  std::map<std::string, std::vector<int64_t>> shapes = {{"model.embed_tokens.weight", {100, 64}},
                                                        {"model.norm.weight", {64}},
                                                        {"lm_head.weight", {100, 64}}};
  for (const char* layer : {"model.layers.0.", "model.layers.1."}) {
    for (const char* of : {"q", "k", "v", "o"})
      shapes[absl::StrCat(layer, "self_attn.", of, "_proj.weight")] = {64, 64};
    for (const char* of : {"gate", "up"})
      shapes[absl::StrCat(layer, "mlp.", of, "_proj.weight")] = {128, 64};
    shapes[absl::StrCat(layer, "mlp.down_proj.weight")] = {64, 128};
    for (const char* of : {"input", "post_attention"})
      shapes[absl::StrCat(layer, of, "_layernorm.weight")] = {64};
  }
  nlohmann::json header;
  int64_t bytes = 0;
  for (const auto& [name, shape] : shapes) {
    const int64_t end = bytes + 2 * shape[0] * (shape.size() > 1 ? shape[1] : 1);
    header[name] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {bytes, end}}};
    bytes = end;
  }
  const std::string text = header.dump();
  std::string length(8, '\0');
  for (size_t byte = 0; byte < 8; ++byte)
    length[byte] = static_cast<char>(text.size() >> (8 * byte) & 0xff);
  const std::string file =
      "--safetensors " + Write("model.safetensors", length + text + std::string(bytes, '\0'));
  for (const char* question : {" --tensor 2 --stage 1", " --tensor auto --stage 3"}) {
    EXPECT_EQ(Json(file + question)["chosen"], Json("--config-json " + config + question)["chosen"])
        << question;
  }
  EXPECT_THAT(Run(file + " --tensor 2").printed, HasSubstr("and its config.json"));
  ExpectRefused(file + " --tensor 8", "at most 4");
  ExpectRefused(file + " --tensor 2 --trainable norm", "a part of it is frozen");
}

TEST_F(Questions, WhichModelsTensorRanksCannotShare) {
  ExpectRefused("--model llama-3-8b --ranks 16 --tensor 16", "at most 8");
  ExpectRefused("--model llama-3-8b --ranks 6 --tensor 4", "use a multiple of 4 ranks");
  ExpectRefused("--model llama-3-8b --tensor x", "must be auto, or a number");
  const std::string header =
      R"({"layers.0.w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}})";
  const std::string length = {static_cast<char>(header.size()), 0, 0, 0, 0, 0, 0, 0};
  const std::string file = Write("s.safetensors", length + header + std::string(16, 0));
  ExpectRefused("--safetensors " + file + " --tensor 2",
                "put the model's config.json beside it, or give --config-json, --model or sizes");
  Write("config.json", R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
      "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100})");
  ExpectRefused("--safetensors " + file + " --tensor 2", "config.json is of another model, of ");
  ExpectRefused("--model llama-3-8b --tensor 2 --lora-rank 8 --quantized 4bit", "4 bits");
  ExpectRefused("--model llama-3-8b --sequence-parallel", "needs --tensor");
  ExpectRefused("--model llama-3-8b --ranks 4 --tensor 4 --sequence-parallel --context 4098",
                "--context is 4098: use a multiple of 4");
  ExpectRefused("--model llama-3-8b --tensor 2 --sequence-parallel --activations torch",
                "is not known");
  ExpectRefused("--model llama-3-8b --tensor auto --activations 4GiB", "give --tensor N");
}

TEST_F(Questions, TheLargestContextIsOfEachPlaceOfTheStates) {
  const std::string question = "--model gpt2-xl --machine 1xrtx4090 --largest context";
  const auto json = Json(question);
  const auto& most = json["largest"]["with_states"];
  EXPECT_GT(most["device"], 0);
  EXPECT_GE(most["cpu"], most["device"]);
  EXPECT_GE(most["nvme"], most["cpu"]);
  const std::string printed = Run(question).printed;
  for (const char* place : {"states on the device", "states in RAM", "states on NVMe"})
    EXPECT_THAT(printed, HasSubstr(place));
  // One of the lines has the number of "at most", also if that needs other keys.
  for (const char* asked : {"--model gpt2-xl --machine rtx4090-64gb --largest context",
                            "--model gpt2 --machine 1xrtx4090 --largest batch",
                            "--model llama-2-7b --machine 1xrtx3090 --largest model"}) {
    const auto largest = Json(asked)["largest"];
    int64_t most_of_lines = 0;
    for (const auto& line : largest["with_states"])
      most_of_lines = std::max(most_of_lines, line.get<int64_t>());
    EXPECT_EQ(largest["most"], most_of_lines) << asked;
  }
}

TEST_F(Questions, AHubsPathGetsWhatToGiveInstead) {
  ExpectRefused("--model meta-llama/Llama-3-8B", "give its config.json to --config-json");
}

}  // namespace
}  // namespace ebb::plan_questions_test
