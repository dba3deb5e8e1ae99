// ebb-plan as a program: its output, its files, and how it refuses senseless questions.
#include "tests/planner/plan_program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/config.h"
#include "nlohmann/json.hpp"

namespace ebb::plan_program_test {
namespace {

using ::testing::HasSubstr;

TEST_F(PlanProgramTest, WrongWordsGetTheNearestOne) {
  ExpectRefused("--modle gpt2", "did you mean --model");
  ExpectRefused("--model gtp2", "did you mean gpt2");
  ExpectRefused("--model gpt2 --machine 8xh10", "did you mean 8xh100");
  ExpectRefused("--model gpt2 --largest modl", "must be one of model|batch|context");
  ExpectRefused("--model gpt2 --stage 3 --offload-param nvm", "must be one of none|cpu|nvme");
  ExpectRefused("--model gpt2 --dtype bf61", "must be one of bf16|fp16|fp32");
}

TEST_F(PlanProgramTest, ImpossibleQuestionsAreRefused) {
  ExpectRefused("", "no model");
  ExpectRefused("--layers 4", "width is missing");
  ExpectRefused("--layers -4", "not in range 1 to");
  ExpectRefused("--model gpt2 --context 99999999999", "not in range 1 to");
  ExpectRefused("--layers 4 --width 65 --heads 4", "not a multiple");
  ExpectRefused("--model gpt2 --ranks 0", "ranks");
  ExpectRefused("--model gpt2 --ranks 2 --machine rtx4090-64gb", "network_gb_s");
  ExpectRefused("--model gpt2 --batch 99999999999999999999", "batch");
  ExpectRefused("--model gpt2 --stage 4", "stage");
  ExpectRefused("--model gpt2 --config " + Path("absent.json"), "absent.json");
  ExpectRefused("--config-json " + Path("absent.json"), "absent.json");
  ExpectRefused("--config-json " + Write("c.json", "{\"hidden_size\": 1e99}"), "c.json");
  ExpectRefused("--safetensors " + Write("s.safetensors", std::string(8, '\xff')), "s.safetensors");
  ExpectRefused("--model gpt2 --machine " + Write("m.json", "{\"gpu\": 1}"),
                "did you mean \"gpus\"");
  ExpectRefused("--model gpt2 --machine " + Write("big.json", std::string(2 << 20, ' ')),
                "more than the 1048576");
  ExpectRefused("--model gpt2 --config " + folder_, folder_);
}

TEST_F(PlanProgramTest, OutputThatCannotBeWrittenIsAnError) {
  for (const char* arguments : {"--model gpt2", "--model gpt2 --json", "--list", "--help"})
    EXPECT_EQ(Run(absl::StrCat(arguments, " >/dev/full")).code, 2) << arguments;
}

// A pipe without a writer would block the program.
TEST_F(PlanProgramTest, PipesAreRefused) {
  const std::string pipe = Path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const char* flags :
       {"--config-json ", "--safetensors ", "--model gpt2 --machine ", "--model gpt2 --deepspeed "})
    ExpectRefused(flags + pipe, "not a regular file");
}

TEST_F(PlanProgramTest, FlagsThatWouldDoNothingAreRefused) {
  const std::string config = Write("config.json", R"({"model_type": "llama", "hidden_size": 64,
      "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100})");
  EXPECT_EQ(Run("--config-json " + config).code, 0);
  ExpectRefused("--model gpt2 --config-json " + config, "--config-json");
  ExpectRefused("--model gpt2 --safetensors x", "--safetensors");
  ExpectRefused("--config-json x --safetensors y", "--safetensors");
  ExpectRefused("--layers 2 --safetensors x", "--safetensors");
  ExpectRefused("--model gpt2 --head-width 70000", "head-width");
  const auto dense = Json("--model mixtral-8x7b --experts 1");
  EXPECT_EQ(dense["model"]["parameters"], Json("--model mistral-7b")["model"]["parameters"]);
}

TEST_F(PlanProgramTest, SaysThatOnlyTheTextIsCountedAlsoOfALongPath) {
  const std::string file = Write("config_of_a_model_with_quite_a_long_name.json",
                                 R"({"text_config": {"model_type": "llama", "hidden_size": 64,
      "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
      "vocab_size": 100}})");
  for (const char* question : {" --stage 0", " --compare 8xh100"})
    EXPECT_THAT(Run("--config-json " + file + question).printed,
                HasSubstr(".json, only its text_config: "));
}

TEST_F(PlanProgramTest, SaysWhatIsCountedOtherThanTheNameSays) {
  const std::string file = Write("c.json", R"({"model_type": "llama", "hidden_size": 64,
      "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
      "vocab_size": 100, "architectures": ["LlamaForSequenceClassification"]})");
  EXPECT_THAT(Run("--config-json " + file + " --stage 0").printed,
              HasSubstr("c.json, with a language model's head: "));
  EXPECT_THAT(Run("--model gpt2 --stage 0 --vocabulary 1000").printed,
              HasSubstr("gpt2, other sizes: "));
  EXPECT_THAT(Run("--model gpt2 --stage 0 --vocabulary 50257").printed, HasSubstr("gpt2: "));
}

TEST_F(PlanProgramTest, NamesUnknownKeysOfAConfiguration) {
  const std::string file = Write("unknown.json", R"({"job": 7})");
  EXPECT_THAT(Run("--model gpt2 --deepspeed " + file).printed,
              HasSubstr("unknown.json: \"job\" is not a key"));
}

TEST_F(PlanProgramTest, SaysThatAContextIsLongerThanTheModels) {
  EXPECT_THAT(Run("--model gpt2 --context 2048").printed,
              HasSubstr("longer than the 1024 tokens that gpt2 is made for"));
  EXPECT_THAT(Run("--model gpt2 --context 1024").printed, testing::Not(HasSubstr("longer")));
  EXPECT_THAT(Run("--model gpt2 --largest context").printed, HasSubstr("made for 1024"));
}

TEST_F(PlanProgramTest, WritesAConfigurationThatEbbLoadsAndAFileForPerfetto) {
  const Ended ended = Run("--model gpt2-xl --machine rtx4090-64gb --write " + Path("w.json") +
                          " --trace " + Path("t.json") + " --svg " + Path("p.svg"));
  ASSERT_EQ(ended.code, 0) << ended.printed;
  EXPECT_THAT(ended.printed, HasSubstr("the fastest that fits"));
  const absl::StatusOr<Config> config = Config::FromFile(Path("w.json"));
  ASSERT_TRUE(config.ok()) << config.status();
  const auto events = nlohmann::json::parse(Read(Path("t.json")));
  EXPECT_GT(events.size(), 100u);
  EXPECT_THAT(Read(Path("p.svg")), HasSubstr("</svg>"));
  // The written file can itself be planned.
  const Ended again = Run("--model gpt2-xl --machine rtx4090-64gb --config " + Path("w.json"));
  EXPECT_EQ(again.code, 0) << again.printed;
  EXPECT_THAT(again.printed, HasSubstr("as asked"));
}

TEST_F(PlanProgramTest, AnswersAboutADeepSpeedFile) {
  const std::string file = Write("ds.json", R"({
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3,
    "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"}})");
  const Ended ended = Run("--model llama-3-8b --deepspeed " + file + " --json");
  ASSERT_EQ(ended.code, 0) << ended.printed;
  const auto json = nlohmann::json::parse(ended.printed);
  EXPECT_EQ(json["chosen"]["stage"], 3);
  EXPECT_EQ(json["chosen"]["states"], "cpu");
  EXPECT_TRUE(json["chosen"]["fits"]);
  EXPECT_GT(json["chosen"]["moved_bytes"]["copies to the host"], 0)
      << json["chosen"]["moved_bytes"];
  // The staging of calls that ask for state is added.
  EXPECT_GT(json["chosen"]["locked_bytes"], int64_t{8} << 30);
  EXPECT_LT(json["chosen"]["locked_bytes"], json["chosen"]["bytes"]["cpu"]);
}

TEST_F(PlanProgramTest, ATrainBatchSizeIsDividedOverTheRanks) {
  const std::string file = Write("ds.json", R"({"train_batch_size": 64})");
  const std::string question = "--model gpt2 --deepspeed " + file;
  EXPECT_THAT(Run(question).printed, HasSubstr("1 x 8 sequences of"));
  EXPECT_THAT(Run(question + " --micro-batches 2").printed, HasSubstr("2 x 4 sequences of"));
  const auto json = Json(question + " --ranks 64");
  EXPECT_EQ(json["micro_batch_size"], 1);
  EXPECT_THAT(std::string(json["best_change"]["change"]),
              HasSubstr("{\"train_batch_size\": 128, \"train_micro_batch_size_per_gpu\": 2}"));
}

// Advice is keys to merge into the file, like in the error of a memory cap.
TEST_F(PlanProgramTest, AdvisesChangesToAFileThatDoesNotFit) {
  const std::string file = Write("ds.json", R"({"zero_optimization": {"stage": 0}})");
  const std::string question = "--model llama-2-7b --deepspeed ";
  EXPECT_THAT(Run(question + file).printed,
              testing::AllOf(HasSubstr("It does not fit"), HasSubstr("What to change: "),
                             testing::Not(HasSubstr("makes it faster"))));
  const auto json = Json(question + file);
  const std::string remedy = json["remedy"];
  const size_t end = remedy.rfind('}');
  ASSERT_NE(end, std::string::npos) << remedy;
  const auto change = nlohmann::json::parse(remedy.substr(remedy.find('{'), end + 1));
  auto changed = nlohmann::json::parse(Read(file));
  changed.merge_patch(change);
  const auto answer = nlohmann::json::parse(
      Run(question + Write("other.json", changed.dump()) + " --json").printed);
  EXPECT_TRUE(answer["chosen"]["fits"]) << remedy;
  EXPECT_EQ(answer["remedy"], nullptr);
}

TEST_F(PlanProgramTest, PrintsWhatNoOrderOfTheOperationsBeats) {
  const std::string question =
      "--model gpt2-xl --machine rtx4090-64gb --stage 1 --offload-optimizer cpu";
  EXPECT_THAT(Run(question + " --bound").printed,
              testing::AllOf(HasSubstr("No order of these operations takes less than"),
                             HasSubstr("no update before the norm of the whole step")));
  EXPECT_THAT(Run(question).printed, testing::Not(HasSubstr("No order of")));
  const auto chosen = Json(question)["chosen"];
  const std::string line = chosen["bound"]["line"];
  EXPECT_EQ(chosen["bound"]["lines"][line], chosen["bound"]["seconds"]);
  EXPECT_LE(chosen["bound"]["seconds"], 1.02 * chosen["step_seconds"].get<double>());
  EXPECT_TRUE(chosen["bound"]["updates_await_the_norm"]);
}

// With states in RAM, gradients are in RAM too. Two cores take long to sum four of them.
TEST_F(PlanProgramTest, AdvisesToKeepGradientsOnTheGpu) {
  const std::string machine = Write("machine.json", R"({"gpus": 1, "gpu_memory": "3.8GiB",
      "gpu_teraflops": 400, "gpu_memory_gb_s": 1000, "pcie_gb_s": 3, "network_gb_s": 400,
      "ram": "5.2GiB", "ram_gb_s": 60, "cores": 2})");
  const Ended ended =
      Run("--model qwen3-0.6b --context 1024 --batch 8 --micro-batches 4 --ranks 2 "
          "--stage 2 --offload-optimizer cpu --recompute --machine " +
          machine);
  EXPECT_THAT(ended.printed,
              HasSubstr("helps most: {\"ebb\": {\"offload_gradients\": \"device\"}}"));
}

TEST_F(PlanProgramTest, FindsTheCheapestMachine) {
  // One GPU in each host. Several hosts hold a model that one does not.
  const std::string small = Write("small.json", R"({"gpus": 1, "gpu_memory": "4GiB",
      "gpu_teraflops": 50, "gpu_memory_gb_s": 500, "pcie_gb_s": 20, "network_gb_s": 10,
      "ram": "1GiB", "ram_gb_s": 50, "cores": 8})");
  const std::string question =
      absl::StrCat("--model gpt2-medium --compare 8xh100=24 8xa100=14 ", small);
  const Ended shown = Run(question);
  ASSERT_EQ(shown.code, 0) << shown.printed;
  EXPECT_THAT(shown.printed, HasSubstr("\n* "));
  const auto json = Json(question);
  ASSERT_EQ(json["offers"].size(), 3u);
  double least = 1e9, cheapest = 0;
  for (const auto& offer : json["offers"]) {
    if (!offer.contains("price_an_hour")) continue;
    const double seconds = 1e9 / offer["answer"]["tokens_per_second"].get<double>(),
                 price = offer["price_an_hour"].get<double>() * seconds / 3600;
    EXPECT_NEAR(offer["price_of_1e9_tokens"], price, 1e-6 * price);
    least = std::min(least, price);
    if (offer["is_cheapest"]) cheapest = price;
  }
  EXPECT_NEAR(cheapest, least, 1e-6 * least);
  EXPECT_GT(json["offers"][2]["hosts"], 1);
  EXPECT_FALSE(json["offers"][2].contains("price_an_hour"));
  ExpectRefused("--model gpt2 --compare 8xh100=free", "a price is a number");
  ExpectRefused("--model gpt2 --compare 8xh10", "did you mean 8xh100");
  ExpectRefused("--model gpt2 --compare 8xh100 --stage 3", "--stage");
}

TEST_F(PlanProgramTest, OwnActivationsAreOfOneBatch) {
  ExpectRefused("--model gpt2 --activations 12", "at least 1MiB");
  ExpectRefused("--model gpt2 --activations 1GiB --largest batch", "leave --activations out");
  const std::string printed = Run("--model gpt2 --activations 12GiB --recompute").printed;
  EXPECT_THAT(printed, HasSubstr("the given 12.00 GiB, also where blocks are recomputed"));
  EXPECT_THAT(printed, testing::Not(HasSubstr("not recomputing")));
}

TEST_F(PlanProgramTest, FindsTheLargest) {
  const Ended ended = Run("--model gpt2 --machine rtx4090-64gb --largest batch");
  ASSERT_EQ(ended.code, 0) << ended.printed;
  EXPECT_THAT(ended.printed, HasSubstr("sequences a micro-batch"));
  EXPECT_THAT(ended.printed, HasSubstr("at most "));
  EXPECT_THAT(ended.printed, HasSubstr("A machine with twice"));
  const auto json = Json("--model gpt2 --machine rtx4090-64gb --largest batch");
  EXPECT_EQ(json["largest"]["quantity"], "batch");
  EXPECT_EQ(json["largest"]["most"], json["micro_batch_size"]);
  EXPECT_THAT(Run("--model gpt2 --largest model --stage 3 --recompute").printed,
              HasSubstr("at least 1998 layers"));
  EXPECT_THAT(
      Run("--layers 1 --width 64 --heads 1 --context 1 --vocabulary 16 --largest batch").printed,
      HasSubstr("at least 1048576 sequences"));
}

TEST_F(PlanProgramTest, SaysWhatAWrittenFileDoesNotSay) {
  const std::string question = "--model llama-2-7b --write " + Path("w.json");
  EXPECT_THAT(Run(question).printed, testing::Not(HasSubstr("w.json: ")));
  EXPECT_THAT(Run(question + " --stage 3 --recompute").printed,
              HasSubstr("w.json: the trainer must recompute"));
  EXPECT_THAT(Run(question + " --stage 0").printed, HasSubstr("w.json: it does not fit"));
}

TEST_F(PlanProgramTest, DoesNotWriteWhatEbbRefuses) {
  const Ended ended =
      Run("--model gpt2 --stage 0 --offload-optimizer cpu --write " + Path("refused.json"));
  EXPECT_EQ(ended.code, 2) << ended.printed;
  EXPECT_THAT(ended.printed, HasSubstr("refused.json: it is not written, because Ebb refuses"));
  EXPECT_FALSE(std::filesystem::exists(Path("refused.json")));
}

TEST_F(PlanProgramTest, TheConfigurationAskedAboutHasALine) {
  EXPECT_THAT(Run("--model llama-2-7b --stage 3 --recompute").printed,
              HasSubstr("\n* 3     device     device yes"));
  const std::string printed = Run("--model llama-2-7b --stage 0 --offload-optimizer nvme").printed;
  EXPECT_THAT(printed, HasSubstr("\n* 0     device     NVMe "));
  EXPECT_THAT(printed, HasSubstr("as asked: stage 0, states on NVMe"));
}

TEST_F(PlanProgramTest, AnswersWithTheRemedyWhereNoLineFits) {
  const std::string small = Write("small.json", R"({"gpus": 1, "gpu_memory": "5GiB",
      "gpu_teraflops": 50, "gpu_memory_gb_s": 500, "pcie_gb_s": 20, "ram": "2GiB", "ram_gb_s": 50,
      "cores": 8, "disk": "1TB", "disk_read_gb_s": 5, "disk_write_gb_s": 5})");
  const std::string printed = Run("--model gpt2-xl --machine " + small).printed;
  EXPECT_THAT(printed, HasSubstr("this fits with other keys: stage 3"));
  EXPECT_THAT(printed, testing::Not(HasSubstr("Nothing fits")));
}

TEST_F(PlanProgramTest, ListsModelsAndMachines) {
  const Ended ended = Run("--list");
  EXPECT_EQ(ended.code, 0);
  for (const char* word : {"mixtral-8x7b", "qwen2.5-7b", "8xa100", "here"})
    EXPECT_THAT(ended.printed, HasSubstr(word));
  EXPECT_EQ(Run("--help").code, 0);
}

// With the widest numbers, beside what every answer here has.
TEST_F(PlanProgramTest, PrintsAtMostAHundredColumns) {
  for (const char* arguments :
       {"--help", "--model gpt3-175b --machine rtx4090-64gb", "--model llama-3-405b --ranks 1024",
        "--model llama-3-70b --machine 1xh100 --lora-rank 16 --quantized 4bit --all",
        "--model gpt2 --batch-tokens 4M --tokens 1.5e12 --price 98.32 --all"})
    EXPECT_EQ(Run(arguments).code, 0) << arguments;
}

TEST_F(PlanProgramTest, AMachineThatIsShownIsAMachine) {
  for (const char* word : {"8xa100", "here"}) {
    const Ended shown = Run(absl::StrCat("--show-machine --machine ", word));
    ASSERT_EQ(shown.code, 0) << shown.printed;
    const Ended ended = Run("--model gpt2 --machine " + Write("machine.json", shown.printed));
    EXPECT_EQ(ended.code, 0) << ended.printed;
  }
}

}  // namespace
}  // namespace ebb::plan_program_test
