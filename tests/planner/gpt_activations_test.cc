// The model of activations, and of a GPT as a whole, against the plan of examples/gpt.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <utility>

#include "ebb/runtime/engine/program.h"
#include "ebb/runtime/planner/activations.h"
#include "ebb/runtime/planner/model_shape.h"
#include "examples/gpt/model/workload.h"
#include "examples/gpt/ops/ops.h"

namespace ebb::planner {
namespace {

struct Case {
  int64_t layers, width, heads, context, vocabulary, batch;
  bool recompute;
  DType dtype;
};
constexpr Case kCases[] = {
    {12, 768, 12, 1024, 50257, 4, false, DType::kBFloat16},
    {12, 768, 12, 1024, 50257, 4, true, DType::kBFloat16},
    {48, 1600, 25, 1024, 50257, 8, false, DType::kBFloat16},
    {48, 1600, 25, 1024, 50257, 8, true, DType::kBFloat16},
    {24, 1024, 16, 512, 50257, 2, false, DType::kFloat32},
};

Config ConfigOf(const Case& c, int stage) {
  Config config;
  config.compute = c.dtype;
  config.micro_batch_size = c.batch;
  config.gradient_accumulation_steps = 2;
  config.zero.stage = stage;
  return config;
}

gpt::Workload GptOf(const Case& c, const Config& config) {
  gpt::Options options;
  options.shape = {.layers = c.layers,
                   .heads = c.heads,
                   .width = c.width,
                   .context = c.context,
                   .vocabulary = c.vocabulary};
  options.recompute = c.recompute;
  return *gpt::WorkloadOf(options, config, gpt::Processor(DeviceKind::kCuda, 1));
}

Model ModelOf(const Case& c) {
  return planner::ModelOf(*Complete(ModelShape::Gpt2({.name = "gpt",
                                                      .layers = c.layers,
                                                      .width = c.width,
                                                      .heads = c.heads,
                                                      .vocabulary = c.vocabulary,
                                                      .context = c.context,
                                                      .tied_head = true})));
}

Pass PassOf(const Case& c) {
  return {.sequences = c.batch,
          .context = c.context,
          .micro_batches = 2,
          .recompute = c.recompute,
          .compute = c.dtype};
}

TEST(Activations, AreWhatGptTakesOnAGpu) {
  for (const Case& c : kCases) {
    const Config config = *ConfigOf(c, 3).ForWorld(2);
    const gpt::Workload work = GptOf(c, config);
    const int64_t of_products = gpt::ScratchBytes(gpt::Processor(DeviceKind::kCuda, 1), c.dtype,
                                                  {.rows = c.batch * c.context,
                                                   .tokens = c.context,
                                                   .width = c.width,
                                                   .heads = c.heads,
                                                   .vocabulary = c.vocabulary});
    const auto counted = static_cast<double>(work.spec.workspace_bytes - of_products);
    const Activations modelled = *ActivationsOf(ModelOf(c), PassOf(c));
    // gpt's chunks of logits are whole tiles of 256 rows, which need not fit in a narrow block's
    // scratch.
    const auto tile = static_cast<double>(256 * c.vocabulary * SizeOf(c.dtype));
    EXPECT_NEAR(static_cast<double>(modelled.workspace()), counted, 0.02 * counted + tile)
        << c.layers << " layers, width " << c.width;
    EXPECT_EQ(modelled.boundary, work.spec.forward.front().output_bytes);
  }
}

// A config gives the pools that the engine makes for gpt's own model.
TEST(Activations, EveryClassOfAPlanIsThatOfGptsPlan) {
  for (const Case& c : kCases) {
    for (const int stage : {0, 1, 2, 3}) {
      const Config config = ConfigOf(c, stage);
      const auto ours = PredictMemory(*SpecOf(ModelOf(c), PassOf(c)), 2, config),
                 theirs = PredictMemory(GptOf(c, *config.ForWorld(2)).spec, 2, config);
      ASSERT_TRUE(ours.ok() && theirs.ok()) << ours.status() << theirs.status();
      std::map<std::pair<Tier, StateClass>, double> bytes;
      for (const MemoryRow& row : *theirs)
        bytes[{row.tier, row.state}] = static_cast<double>(row.predicted_bytes);
      EXPECT_EQ(ours->size(), theirs->size());
      for (const MemoryRow& row : *ours) {
        if (row.state == StateClass::kWorkspace || row.state == StateClass::kStaging) continue;
        const double expected = bytes[{row.tier, row.state}];
        EXPECT_NEAR(static_cast<double>(row.predicted_bytes), expected, 0.01 * expected)
            << Name(row.state) << " at stage " << stage;
      }
    }
  }
}

// Korthikanti et al. (arXiv 2205.05198), table 2, without tensor parallelism: a layer of width h and a
// heads keeps s b h (34 + 5 a s / h) bytes for b sequences of s tokens, and recomputed 2 s b h. Backward
// here computes the outputs of two norms (4) and of the activation function (8) again, and there is no
// dropout (masks 2; of attention 3 of the 5). Their models of 22, 175, 530 and 1,000 billion.
TEST(Activations, AreThoseOfKorthikantisTableWithoutWhatIsComputedAgain) {
  constexpr int64_t kSizes[][3] = {
      {48, 6144, 64}, {96, 12288, 96}, {105, 20480, 128}, {128, 25600, 160}};
  constexpr int64_t kTokens = 2048, kSequences = 4;
  for (const auto& [layers, width, heads] : kSizes) {
    const Model model = planner::ModelOf(*Complete(ModelShape::Gpt2({.name = "gpt",
                                                                     .layers = layers,
                                                                     .width = width,
                                                                     .heads = heads,
                                                                     .vocabulary = 51200,
                                                                     .context = kTokens,
                                                                     .tied_head = true})));
    Pass pass{.sequences = kSequences, .context = kTokens};
    // In bytes of a layer, by s b h: what it keeps, and its input.
    const auto of_layer = [&] {
      const Activations found = *ActivationsOf(model, pass);
      const double kept =
          static_cast<double>(found.kept) / (pass.recompute ? 1.0 : static_cast<double>(layers));
      return (kept + static_cast<double>(found.boundary)) /
             static_cast<double>(kTokens * kSequences * width);
    };
    constexpr double kPaper = 34, kComputedAgain = 4 + 8, kMasks = 2, kRows = 0.01;
    const double fused = of_layer(),
                 per_head = static_cast<double>(heads * kTokens) / static_cast<double>(width);
    EXPECT_NEAR(fused, kPaper - kComputedAgain - kMasks, kRows * kPaper) << width;
    pass.fused_attention = false;
    EXPECT_NEAR(of_layer() - fused, (5 - 3) * per_head, kRows * per_head) << width;
    pass.recompute = true;
    EXPECT_EQ(ActivationsOf(model, pass)->boundary, 2 * kTokens * kSequences * width);
  }
}

TEST(Activations, RecomputingKeepsOneBlockAndUnfusedAttentionItsScores) {
  const Model model = planner::ModelOf(*ShapeOfName("llama-2-7b"));
  const Pass pass{.sequences = 2, .context = 4096};
  const Activations all = *ActivationsOf(model, pass);
  Pass other = pass;
  other.recompute = true;
  EXPECT_EQ(ActivationsOf(model, other)->kept, all.kept / 32);
  other = pass;
  other.fused_attention = false;
  // 32 heads, 4,096 positions, 2 bytes, for each of 8,192 tokens and 32 blocks.
  EXPECT_EQ(ActivationsOf(model, other)->kept - all.kept, int64_t{32} * 4096 * 2 * 8192 * 32);
  other = pass;
  other.whole_logits = true;
  EXPECT_EQ(ActivationsOf(model, other)->scratch - all.scratch, int64_t{32000} * 6 * 8192);
  other = pass;
  other.own_activations = 1000;
  EXPECT_EQ(ActivationsOf(model, other)->workspace(), 1000);
}

}  // namespace
}  // namespace ebb::planner
