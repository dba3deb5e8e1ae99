#include "ebb/runtime/planner/published_runs.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "ebb/runtime/planner/answer.h"
#include "ebb/runtime/planner/named_machines.h"
#include "ebb/runtime/planner/trials.h"
#include "nlohmann/json.hpp"

namespace ebb::planner {
namespace {

ModelShape Shape(const char* name) {
  return *ShapeOfName(name);
}
ModelShape Gated(const char* name, int64_t layers, int64_t width, int64_t heads, int64_t keys,
                 int64_t feed_forward) {
  return *Complete({.name = name,
                    .layers = layers,
                    .width = width,
                    .heads = heads,
                    .key_value_heads = keys,
                    .feed_forward = feed_forward,
                    .vocabulary = 32000,
                    .context = 4096});
}
ModelShape Mpt(const char* name, int64_t layers, int64_t width, int64_t heads) {
  return *Complete(ModelShape::Gpt2({.name = name,
                                     .layers = layers,
                                     .width = width,
                                     .heads = heads,
                                     .feed_forward = 4 * width,
                                     .vocabulary = 50368,
                                     .context = 2048,
                                     .tied_head = true}));
}

// The tokens per second of a rate given as a share of a GPU's peak, if P parameters and all
// positions of attention are counted.
double TokensOfMfu(double mfu, double peak, double parameters, double layers, double width,
                   double context) {
  return mfu * peak / (6 * parameters + 12 * layers * width * context);
}
// TFLOPS that include recomputing.
double TokensOfTflops(double tflops, const ModelShape& shape, int64_t context) {
  const Model model = ModelOf(shape);
  return tflops * 1e12 * static_cast<double>(context) /
         (FlopsOf(model, {.context = context}) * 4 / 3);
}

double SimulatedTokens(const PublishedStep& run, double teraflops) {
  Question question{.model = ModelOf(run.shape),
                    .machine = *MachineOfName(run.machine),
                    .ranks = run.ranks,
                    .config = {},
                    .pass = {.context = run.context}};
  Machine& machine = question.machine;
  if (run.network_gb_s > 0) machine.network_gb_s = run.network_gb_s;
  // Backward takes twice the time of forward.
  machine.gpu_teraflops = teraflops / (1 + run.selected / 3);
  // The published runs did fit, but with other activations. So the GPU gets more memory.
  machine.gpu_memory *= 4;
  Config& config = question.config;
  config.compute = DType::kBFloat16;
  config.micro_batch_size = run.batch;
  config.gradient_accumulation_steps = 1;
  config.zero.prefetch_bucket_size = 2 * question.model.largest_unit();
  config.zero.max_live_parameters = 4 * question.model.largest_unit();
  const Answer answer =
      AnswerFor(question, {.stage = run.stage, .recompute = run.recompute}, Depth::kTime);
  return SpeedOf(answer) / run.ranks;
}

double NamedTeraflops(const PublishedStep& run) {
  return MachineOfName(run.machine)->gpu_teraflops;
}

// The rate with which the simulation has the published speed.
double TeraflopsOf(const PublishedStep& run) {
  double teraflops = NamedTeraflops(run);
  for (int times = 0; times < 4; ++times)
    teraflops *= run.tokens_per_second / SimulatedTokens(run, teraflops);
  return teraflops;
}

// The share of the forward's products that torchtitan's selective checkpointing computes again: of
// a block's seven, in their order, every second (torchtitan, activation_checkpoint.py).
double SelectedByTorchtitan(const ModelShape& s, int64_t context) {
  const auto width = static_cast<double>(s.width), keys = static_cast<double>(s.keys()),
             inside = static_cast<double>(s.feed_forward);
  const double keys_output_and_up = width * keys + width * width + width * inside;
  return 2 * static_cast<double>(s.layers * context) * keys_output_and_up /
         (FlopsOf(ModelOf(s), {.context = context}) / 3);
}

// Whose speed the simulated one has.
std::string RateText(const PublishedRun& run) {
  return run.rate ? run.rate->name : "the machine, because the program published no other run";
}

bool IsNear(double ratio) {
  constexpr double kNear = 0.15;
  return std::abs(ratio - 1) <= kNear;
}

}  // namespace

std::vector<PublishedRun> PublishedRuns() {
  std::vector<PublishedRun> runs;
  // `rate`: the run that gives the program's rate.
  const auto add = [&](PublishedStep step, std::optional<PublishedStep> rate = std::nullopt) {
    runs.push_back({.step = std::move(step), .rate = std::move(rate)});
  };
  // arXiv 2304.11277, section 5.4: 173 and 186 TFLOPS a GPU, recomputing counted.
  add({"FSDP paper, 175 B, 128 A100, batch 1", "8xa100", 0, Shape("gpt3-175b"), 128, 3, 1, 2048,
       true, TokensOfTflops(173, Shape("gpt3-175b"), 2048)});
  add({"FSDP paper, 175 B, 128 A100, batch 2", "8xa100", 0, Shape("gpt3-175b"), 128, 3, 2, 2048,
       true, TokensOfTflops(186, Shape("gpt3-175b"), 2048)});
  // foundation-model-stack/fms-fsdp, README of March 2024: 400 Gb/s a host of A100, 800 Gb/s a
  // host of H100. The rates are of the current README: without recomputing 7 B, measured again,
  // and 13 B, recomputed 70 B. For H100 of an earlier one, which recomputes some blocks, and
  // does not say how many: none is counted.
  add({"fms-fsdp, Llama 2 7 B, 128 A100", "8xa100", 50, Shape("llama-2-7b"), 128, 3, 2, 4096, false,
       3700},
      PublishedStep{"fms-fsdp, README, 13 B, 128 A100", "8xa100", 50, Shape("llama-2-13b"), 128, 3,
                    1, 4096, false, 1700});
  add({"fms-fsdp, Llama 2 13 B, 128 A100", "8xa100", 50, Shape("llama-2-13b"), 128, 3, 2, 4096,
       false, 1800},
      PublishedStep{"fms-fsdp, README, 7 B, 128 A100", "8xa100", 50, Shape("llama-2-7b"), 128, 3, 2,
                    4096, false, 3760});
  add({"fms-fsdp, 34 B, 128 A100, recomputed", "8xa100", 50, Gated("34B", 48, 8192, 64, 8, 22016),
       128, 3, 2, 4096, true, 700},
      PublishedStep{"fms-fsdp, README, 70 B, 128 A100", "8xa100", 50, Shape("llama-2-70b"), 128, 3,
                    6, 4096, true, 380});
  add({"fms-fsdp, Llama 2 7 B, 96 H100", "8xh100", 100, Shape("llama-2-7b"), 96, 3, 2, 4096, false,
       7500},
      PublishedStep{"fms-fsdp, README, 13 B, 96 H100", "8xh100", 100, Shape("llama-2-13b"), 96, 3,
                    2, 4096, false, 3800});
  // mosaicml/llm-foundry, scripts/train/benchmarking: MFU of 989 TFLOPS, 2,048 tokens. The
  // machine's rate is that of its 13 B on 8 H100, the nearest size that is not recomputed.
  add({"llm-foundry, MPT 7 B, 8 H100", "8xh100", 0, Mpt("mpt-7b", 32, 4096, 32), 8, 3, 6, 2048,
       false, TokensOfMfu(0.464, 989e12, 6.66e9, 32, 4096, 2048)});
  add({"llm-foundry, MPT 7 B, 512 H100", "8xh100", 0, Mpt("mpt-7b", 32, 4096, 32), 512, 3, 6, 2048,
       false, TokensOfMfu(0.422, 989e12, 6.66e9, 32, 4096, 2048)});
  add({"llm-foundry, MPT 70 B, 64 H100, recomputed", "8xh100", 0, Mpt("mpt-70b", 80, 8192, 64), 64,
       3, 8, 2048, true, TokensOfMfu(0.426, 989e12, 64.9e9, 80, 8192, 2048)},
      PublishedStep{"llm-foundry, MPT 30 B, 32 H100", "8xh100", 0, Mpt("mpt-30b", 48, 7168, 64), 32,
                    3, 14, 2048, true, 2308});
  // pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100 of 500 W, with its
  // selective checkpointing.
  add({"torchtitan, Llama 3 8 B, 8 H100, compiled", "8xh100", 0, Shape("llama-3-8b"), 8, 3, 2, 8192,
       false, 6667, SelectedByTorchtitan(Shape("llama-3-8b"), 8192)});
  add({"torchtitan, Llama 3 8 B, 128 H100, compiled", "8xh100", 0, Shape("llama-3-8b"), 128, 3, 2,
       8192, false, 6514, SelectedByTorchtitan(Shape("llama-3-8b"), 8192)});
  add({"torchtitan, Llama 3 8 B, 8 H100, eager", "8xh100", 0, Shape("llama-3-8b"), 8, 3, 2, 8192,
       false, 5762, SelectedByTorchtitan(Shape("llama-3-8b"), 8192)},
      PublishedStep{"torchtitan, Llama 3 8 B, 128 H100, eager", "8xh100", 0, Shape("llama-3-8b"),
                    128, 3, 2, 8192, false, 5605, SelectedByTorchtitan(Shape("llama-3-8b"), 8192)});
  // karpathy/llm.c, scripts/run_gpt2_124M.sh and run_gpt2_1558M.sh: steps of 0.3 and 2.8 s;
  // run_gpt2_350M.sh: 0.82 s for 524,288 tokens. It published no other run on H100.
  add({"llm.c, GPT-2 124 M, 8 A100", "8xa100", 0, Shape("gpt2"), 8, 1, 64, 1024, false, 218'000},
      PublishedStep{"llm.c, GPT-2 350 M, 8 A100", "8xa100", 0, Shape("gpt2-medium"), 8, 1, 64, 1024,
                    false, 524288 / 0.82 / 8});
  add({"llm.c, GPT-2 1.56 B, 8 H100", "8xh100", 0, Shape("gpt2-xl"), 8, 1, 16, 1024, false,
       46'800});
  return runs;
}

PredictedRatio RatioOf(const PublishedRun& run) {
  const double machine = SimulatedTokens(run.step, NamedTeraflops(run.step)),
               program = run.rate ? SimulatedTokens(run.step, TeraflopsOf(*run.rate)) : machine;
  return {.of_program = program / run.step.tokens_per_second,
          .of_machine = machine / run.step.tokens_per_second};
}

std::string PublishedRunsText() {
  std::string text = absl::StrFormat("%-43s %13s %9s %7s %15s\n", "published run", "tokens/s/GPU",
                                     "simulated", "error", "machine's rate");
  const std::vector<PublishedRun> runs = PublishedRuns();
  int within = 0, within_by_machine = 0;
  for (const PublishedRun& run : runs) {
    const double tokens = run.step.tokens_per_second;
    const PredictedRatio ratio = RatioOf(run);
    absl::StrAppendFormat(&text, "%-43s %13.0f %9.0f %+6.1f%% %+14.1f%%\n", run.step.name, tokens,
                          ratio.of_program * tokens, 100 * (ratio.of_program - 1),
                          100 * (ratio.of_machine - 1));
    absl::StrAppendFormat(&text, "    rate of: %s\n", RateText(run));
    within += IsNear(ratio.of_program), within_by_machine += IsNear(ratio.of_machine);
  }
  absl::StrAppendFormat(&text, "%d of %d within 15%%, with the machine's rate %d\n", within,
                        runs.size(), within_by_machine);
  return text;
}

std::string PublishedRunsAsJson() {
  nlohmann::ordered_json json = {{"runs", nlohmann::ordered_json::array()}};
  for (const PublishedRun& run : PublishedRuns()) {
    const double tokens = run.step.tokens_per_second;
    const PredictedRatio ratio = RatioOf(run);
    json["runs"].push_back({{"name", run.step.name},
                            {"machine", run.step.machine},
                            {"ranks", run.step.ranks},
                            {"published_tokens_per_second", tokens},
                            {"simulated_tokens_per_second", ratio.of_program * tokens},
                            {"error", ratio.of_program - 1},
                            {"error_with_machines_rate", ratio.of_machine - 1},
                            {"rate_of", RateText(run)}});
  }
  return json.dump(2) + "\n";
}

}  // namespace ebb::planner
