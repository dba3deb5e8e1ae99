// Simulated steps against published runs: most are within 15%, and the others are listed as
// exceptions. None of these runs sets a rate of a machine (named_machines.cc).
// bench/results/2026-11-25-plan.md lists sources and earlier results.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "ebb/runtime/planner/answer.h"
#include "ebb/runtime/planner/model_shape.h"
#include "ebb/runtime/planner/named_machines.h"

namespace ebb::planner::published_runs_test {
namespace {

struct PublishedStep {
  const char* name;
  const char* machine;
  double network_gb_s;  // of a host; 0: the machine's
  ModelShape shape;
  int ranks, stage;
  int64_t batch, context;
  bool recompute;
  double tokens_per_second;  // of one GPU, as published
  bool matches;
};

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

class PublishedRun : public ::testing::TestWithParam<PublishedStep> {};

double SimulatedTokens(const PublishedStep& run) {
  Question question{.model = ModelOf(run.shape),
                    .machine = *MachineOfName(run.machine),
                    .ranks = run.ranks,
                    .config = {},
                    .pass = {.context = run.context}};
  if (run.network_gb_s > 0) question.machine.network_gb_s = run.network_gb_s;
  // The published runs did fit, but with other activations. So the GPU gets more memory.
  question.machine.gpu_memory *= 4;
  Config& config = question.config;
  config.compute = DType::kBFloat16;
  config.micro_batch_size = run.batch;
  config.gradient_accumulation_steps = 1;
  config.zero.prefetch_bucket_size = 2 * question.model.largest_unit();
  config.zero.max_live_parameters = 4 * question.model.largest_unit();
  const Answer answer =
      AnswerFor(question, {.stage = run.stage, .recompute = run.recompute}, Depth::kTime);
  EXPECT_TRUE(answer.time) << answer.lacks();
  return answer.time ? answer.time->tokens_per_second / run.ranks : 0;
}

TEST_P(PublishedRun, IsWithin15PercentWhereTheTableSaysSo) {
  const PublishedStep& run = GetParam();
  const double simulated = SimulatedTokens(run), ratio = simulated / run.tokens_per_second;
  std::printf("%-44s published %8.0f simulated %8.0f tokens/s/GPU, %+.1f%%\n", run.name,
              run.tokens_per_second, simulated, 100 * (ratio - 1));
  EXPECT_EQ(std::abs(ratio - 1) <= 0.15, run.matches) << ratio;
}

const PublishedStep kRuns[] = {
    // arXiv 2304.11277, section 5.4: 173 and 186 TFLOPS a GPU, recomputing counted.
    {"FSDP paper, 175 B, 128 A100, batch 1", "8xa100", 0, Shape("gpt3-175b"), 128, 3, 1, 2048, true,
     TokensOfTflops(173, Shape("gpt3-175b"), 2048), true},
    {"FSDP paper, 175 B, 128 A100, batch 2", "8xa100", 0, Shape("gpt3-175b"), 128, 3, 2, 2048, true,
     TokensOfTflops(186, Shape("gpt3-175b"), 2048), true},
    // foundation-model-stack/fms-fsdp, README: 400 Gb/s a host of A100, 800 Gb/s a host of H100.
    {"fms-fsdp, Llama 2 7 B, 128 A100", "8xa100", 50, Shape("llama-2-7b"), 128, 3, 2, 4096, false,
     3700, true},
    {"fms-fsdp, Llama 2 13 B, 128 A100", "8xa100", 50, Shape("llama-2-13b"), 128, 3, 2, 4096, false,
     1800, false},
    {"fms-fsdp, 34 B, 128 A100, recomputed", "8xa100", 50, Gated("34B", 48, 8192, 64, 8, 22016),
     128, 3, 2, 4096, true, 700, true},
    {"fms-fsdp, Llama 2 7 B, 96 H100", "8xh100", 100, Shape("llama-2-7b"), 96, 3, 2, 4096, false,
     7500, false},
    // mosaicml/llm-foundry, scripts/train/benchmarking: MFU of 989 TFLOPS, 2,048 tokens.
    {"llm-foundry, MPT 7 B, 8 H100", "8xh100", 0, Mpt("mpt-7b", 32, 4096, 32), 8, 3, 6, 2048, false,
     TokensOfMfu(0.464, 989e12, 6.66e9, 32, 4096, 2048), true},
    {"llm-foundry, MPT 7 B, 512 H100", "8xh100", 0, Mpt("mpt-7b", 32, 4096, 32), 512, 3, 6, 2048,
     false, TokensOfMfu(0.422, 989e12, 6.66e9, 32, 4096, 2048), true},
    {"llm-foundry, MPT 70 B, 64 H100, recomputed", "8xh100", 0, Mpt("mpt-70b", 80, 8192, 64), 64, 3,
     8, 2048, true, TokensOfMfu(0.426, 989e12, 64.9e9, 80, 8192, 2048), false},
    // pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100 of 500 W.
    {"torchtitan, Llama 3 8 B, 8 H100, compiled", "8xh100", 0, Shape("llama-3-8b"), 8, 3, 2, 8192,
     false, 6667, true},
    {"torchtitan, Llama 3 8 B, 128 H100, compiled", "8xh100", 0, Shape("llama-3-8b"), 128, 3, 2,
     8192, false, 6514, true},
    {"torchtitan, Llama 3 8 B, 8 H100, eager", "8xh100", 0, Shape("llama-3-8b"), 8, 3, 2, 8192,
     false, 5762, false},
    // karpathy/llm.c, scripts/run_gpt2_124M.sh and run_gpt2_1558M.sh: steps of 0.3 and 2.8 s.
    {"llm.c, GPT-2 124 M, 8 A100", "8xa100", 0, Shape("gpt2"), 8, 1, 64, 1024, false, 218'000,
     true},
    {"llm.c, GPT-2 1.56 B, 8 H100", "8xh100", 0, Shape("gpt2-xl"), 8, 1, 16, 1024, false, 46'800,
     false},
};

INSTANTIATE_TEST_SUITE_P(All, PublishedRun, ::testing::ValuesIn(kRuns), [](const auto& test) {
  std::string name = test.param.name;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !isalnum(c); }, '_');
  return name;
});

}  // namespace
}  // namespace ebb::planner::published_runs_test
