// Models over tensor ranks: how their parameters are cut, what a rank keeps and computes, what its
// layers exchange, and which width the search finds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ebb/ebb.h"
#include "ebb/runtime/engine/program.h"
#include "ebb/runtime/planner/adapters.h"
#include "ebb/runtime/planner/answer_table.h"
#include "ebb/runtime/planner/model_shape.h"
#include "ebb/runtime/planner/named_machines.h"
#include "ebb/runtime/planner/offers.h"
#include "ebb/runtime/planner/search.h"
#include "ebb/runtime/planner/trials.h"
#include "ebb/sharding/split.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::planner::tensor_ranks_test {
namespace {

using ::testing::HasSubstr;
using testing::OnThreads;
using Rows = std::map<std::pair<StateClass, Tier>, uint64_t>;

// Three heads of keys and values do not divide by two ranks, nor do the words.
ModelShape Small() {
  return *Complete({.name = "small",
                    .layers = 2,
                    .width = 48,
                    .heads = 6,
                    .key_value_heads = 3,
                    .head_width = 8,
                    .feed_forward = 97,
                    .vocabulary = 101,
                    .context = 64,
                    .query_biases = true,
                    .query_norms = true});
}

Question QuestionOf(const ModelShape& shape, const char* machine, int ranks,
                    std::vector<int> widths) {
  Question question{.model = ModelOf(shape),
                    .machine = *MachineOfName(machine),
                    .ranks = ranks,
                    .config = {},
                    .pass = {.context = std::min<int64_t>(shape.context, 2048)},
                    .widths = std::move(widths),
                    .sizes_gathers = true};
  for (const int width : question.widths) {
    if (width > 1) question.over_tensor.emplace(width, ModelOf(shape, width));
  }
  Config& config = question.config;
  config.compute = DType::kBFloat16;
  config.micro_batch_size = 1;
  config.gradient_accumulation_steps = 1;
  config.zero.offload_param.max_in_cpu = 0;
  config = WithGathers(*question.model_over(question.widths.front()), std::move(config));
  if (question.widths.size() == 1) config.ebb.mesh.tensor = question.widths.front();
  return question;
}
Question QuestionOf(const char* model, const char* machine, int ranks, std::vector<int> widths) {
  return QuestionOf(*ShapeOfName(model), machine, ranks, std::move(widths));
}

Rows RowsOf(const std::vector<MemoryRow>& memory) {
  Rows rows;
  for (const MemoryRow& row : memory) {
    // The staging of calls for state is no pool of the plan.
    if (row.state != StateClass::kStaging) rows[{row.state, row.tier}] = row.predicted_bytes;
  }
  return rows;
}

// Every split parameter is on the ranks once, whatever the width.
TEST(TensorRanks, ShareEveryNamedModel) {
  for (const ModelShape& shape : NamedShapes()) {
    for (const int width : {2, 4, 8}) {
      if (!CheckTensorRanks(shape, width).ok()) continue;
      const Model model = ModelOf(shape, width);
      EXPECT_EQ(model.parameters(), ModelOf(shape).parameters());
      ASSERT_OK_AND_ASSIGN(const ModelSpec spec, SpecOf(model, {.context = 64}));
      SCOPED_TRACE(shape.name);
      EXPECT_OK(Validate(spec));
      int64_t cut = 0, on_ranks = 0;
      for (int rank = 0; rank < width; ++rank) {
        ASSERT_OK_AND_ASSIGN(const ModelSpec blocks, ebb::WithBlocks(spec, rank, width));
        for (const ParameterSpec& parameter : blocks.parameters) {
          if (!parameter.block) continue;
          on_ranks += Elements(ShownShape(parameter));
          if (rank == 0) cut += Elements(WholeShape(parameter));
        }
      }
      EXPECT_EQ(on_ranks, cut) << shape.name << " over " << width;
      // Norms, positions, routers and biases are all that is whole.
      EXPECT_GT(static_cast<double>(cut), 0.98 * static_cast<double>(model.parameters()))
          << shape.name;
    }
  }
  EXPECT_THAT(CheckTensorRanks(*ShapeOfName("llama-3-8b"), 16).message(), HasSubstr("at most 8"));
}

// Queries of a rank are those of its keys and values, also where heads do not divide.
TEST(TensorRanks, HaveWholeGroupsOfHeads) {
  ASSERT_OK_AND_ASSIGN(const ModelSpec spec, SpecOf(ModelOf(Small(), 2), {.context = 64}));
  const std::map<std::string, std::pair<int64_t, int64_t>> rows = {
      {"block0.queries", {32, 16}}, {"block0.keys", {16, 8}}, {"block0.values_bias", {16, 8}}};
  size_t found = 0;
  for (const int rank : {0, 1}) {
    ASSERT_OK_AND_ASSIGN(const ModelSpec blocks, ebb::WithBlocks(spec, rank, 2));
    for (const ParameterSpec& parameter : blocks.parameters) {
      EXPECT_EQ(parameter.sums_gradient, parameter.name.ends_with("_norm")) << parameter.name;
      const auto expected = rows.find(parameter.name);
      if (expected == rows.end()) continue;
      ++found;
      EXPECT_EQ(ShownShape(parameter)[0],
                rank == 0 ? expected->second.first : expected->second.second)
          << parameter.name;
    }
  }
  EXPECT_EQ(found, 2 * rows.size());
}

// The planner's pools are those that PredictMemory has, and those that the engines of all ranks count.
TEST(TensorRanks, MemoryIsWhatTheEnginesCount) {
  constexpr int kRanks = 4;
  for (const bool sequence_parallel : {false, true}) {
    for (const int stage : {0, 1, 2, 3}) {
      Question question = QuestionOf(Small(), "8xh100", kRanks, {2});
      question.pass.sequence_parallel = sequence_parallel;
      question.config.compute = DType::kFloat32;
      const Answer answer = AnswerFor(question, Choice{.stage = stage, .tensor = 2}, Depth::kTime);
      ASSERT_OK(answer.refused);
      Pass pass = question.pass;
      pass.compute = DType::kFloat32;
      ASSERT_OK_AND_ASSIGN(const ModelSpec spec, SpecOf(*question.model_over(2), pass));
      ASSERT_OK_AND_ASSIGN(const std::vector<MemoryRow> predicted,
                           PredictMemory(spec, kRanks, answer.config));
      EXPECT_EQ(RowsOf(answer.memory), RowsOf(predicted)) << "stage " << stage;
      OnThreads(kRanks, [&](World world) {
        ASSERT_OK_AND_ASSIGN(const Engine engine,
                             Engine::Create(world, Device::Cpu(1), spec, answer.config));
        const Rows planned = RowsOf(answer.memory);
        for (const MemoryRow& row : engine.memory()) {
          if (row.state == StateClass::kStaging) continue;
          const auto found = planned.find({row.state, row.tier});
          ASSERT_NE(found, planned.end()) << Name(row.state);
          EXPECT_EQ(found->second, row.peak_bytes) << Name(row.state) << ", stage " << stage;
        }
      });
    }
  }
}

// A table of Korthikanti et al. (arXiv 2205.05198, section 4): of a layer's 34 s b h bytes 10 are
// whole on each of t ranks, 24 / t are not, and with sequence parallelism nothing is. Backward computes
// again what gpt's blocks do not keep: of the whole ones there remain the projection's output and the
// boundary.
TEST(TensorRanks, KeepTheirPartOfActivations) {
  const ModelShape shape = *ShapeOfName("llama-2-7b");
  Pass pass{.context = 4096};
  const Activations one = *ActivationsOf(ModelOf(shape), pass),
                    whole = *ActivationsOf(ModelOf(shape, 4), pass);
  pass.sequence_parallel = true;
  const Activations rows = *ActivationsOf(ModelOf(shape, 4), pass);
  constexpr int64_t kNorms = 16;  // bytes of a row: mean and deviation of two norms
  const int64_t of_layers = shape.layers * pass.tokens(), projection = of_layers * shape.width * 2,
                norms = of_layers * kNorms;
  EXPECT_EQ(whole.kept - projection - norms, (one.kept - projection - norms) / 4);
  EXPECT_EQ(rows.kept - norms, (one.kept - norms) / 4);
  EXPECT_EQ(whole.boundary, one.boundary);
  EXPECT_EQ(rows.boundary, one.boundary / 4);
}

sharding::KernelWork WorkOfBlock(const Model& model, const Pass& pass) {
  const ModelVisit* const block = &model.visits[1];
  return WorkOf(model, {&block, 1}, pass, {.flops = 1e14})[0];
}
Visit VisitOfBlock(const Model& model, const Pass& pass) {
  return SpecOf(model, pass)->forward[1];
}

// Two all-reduces a block and direction, or an all-gather and a reduce-scatter in the place of each.
TEST(TensorRanks, ExchangeTheRowsOfABlock) {
  const ModelShape shape = *ShapeOfName("llama-2-7b");
  Pass pass{.context = 4096};
  const int64_t all_reduces = 2 * 2 * 3 * pass.tokens() * shape.width * 2 / 4;
  const sharding::KernelWork one = WorkOfBlock(ModelOf(shape), pass),
                             whole = WorkOfBlock(ModelOf(shape, 4), pass);
  EXPECT_EQ(VisitOfBlock(ModelOf(shape), pass).forward_tensor_bytes, 0);
  EXPECT_DOUBLE_EQ(whole.forward, one.forward / 4);
  Visit visit = VisitOfBlock(ModelOf(shape, 4), pass);
  EXPECT_EQ(visit.forward_tensor_bytes, all_reduces);
  EXPECT_EQ(visit.backward_tensor_bytes, all_reduces);
  EXPECT_EQ(whole.forward_collectives, 2);
  pass.sequence_parallel = true;
  visit = VisitOfBlock(ModelOf(shape, 4), pass);
  EXPECT_EQ(visit.forward_tensor_bytes, all_reduces);
  EXPECT_EQ(WorkOfBlock(ModelOf(shape, 4), pass).forward_collectives, 4);
  EXPECT_EQ(visit.backward_tensor_bytes, 3 * all_reduces / 2);  // inputs are gathered again
  pass.recompute = true;
  EXPECT_EQ(VisitOfBlock(ModelOf(shape, 4), pass).backward_tensor_bytes, 5 * all_reduces / 2);
}

double MovedOver(const Answer& answer, sharding::Resource link) {
  return answer.time->moved[link];
}

// Eight tensor ranks fill a host, so that data ranks meet over the network; sixteen do not fit into one.
TEST(TensorRanks, ExchangeInsideOfAHostWhereTheyFit) {
  constexpr auto kPeers = sharding::Resource::kPeers, kNetwork = sharding::Resource::kNetwork;
  const auto ask = [](int width) {
    const Question question = QuestionOf("gpt3-175b", "8xh200", 64, {width});
    Answer answer =
        AnswerFor(question, Choice{.stage = 1, .recompute = true, .tensor = width}, Depth::kTime);
    EXPECT_TRUE(answer.fits()) << answer.lacks();
    return answer;
  };
  const Answer eight = ask(8), sixteen = ask(16);
  ASSERT_TRUE(eight.time && sixteen.time);
  // Inside: exchanges. Outside: gathers and reductions of a rank's 1 / 8 of the model over 8 hosts.
  EXPECT_NEAR(MovedOver(eight, kPeers), eight.time->tensor_bytes, 1e-4 * eight.time->tensor_bytes);
  const double part = 2 * 174.6e9 / 8;
  EXPECT_NEAR(MovedOver(eight, kNetwork), 7.0 / 8 * 2 * part, 0.02 * part);
  // Sixteen: 8 rings go through 2 hosts. Their data ranks are on 4 pairs of hosts.
  EXPECT_NEAR(MovedOver(sixteen, kNetwork), sixteen.time->tensor_bytes / 8 + 3.0 / 4 * 2 * part / 2,
              0.02 * part);
  EXPECT_GT(eight.time->simulated.seconds_per_step, eight.time->tensor_seconds);
}

// Korthikanti et al., table 5: a model of 22 B parameters on 8 A100, tensor and sequence parallel, with
// attention recomputed (here fused): a step of 4 sequences of 2,048 tokens takes 1.10 s, which is 41.5%
// of the peak.
TEST(TensorRanks, APublishedStepIsPredicted) {
  const ModelShape shape = *Complete(ModelShape::Gpt2({.name = "22B",
                                                       .layers = 48,
                                                       .width = 6144,
                                                       .heads = 64,
                                                       .feed_forward = 4 * 6144,
                                                       .vocabulary = 51200,
                                                       .context = 2048,
                                                       .tied_head = true}));
  Question question = QuestionOf(shape, "8xa100-80", 8, {8});
  question.pass.sequence_parallel = true;
  question.config.micro_batch_size = 4;
  const Answer answer = AnswerFor(question, Choice{.stage = 0, .tensor = 8}, Depth::kTime);
  ASSERT_TRUE(answer.fits()) << answer.lacks();
  EXPECT_NEAR(answer.time->simulated.seconds_per_step, 1.10, 0.15 * 1.10);
}

// All widths train with one batch. A context that no GPU holds alone needs several.
TEST(TensorRanks, TheSearchFindsAWidth) {
  Question question = QuestionOf("llama-3-8b", "8xh100", 8, {1, 2, 4, 8});
  question.sequences = 8;
  for (const Choice& choice : Choices(question)) {
    const Config config = question.With(choice);
    EXPECT_EQ(config.ebb.mesh.tensor, choice.tensor);
    EXPECT_EQ(question.sequences_of_rank(choice.tensor) * question.data_ranks(choice.tensor), 8);
  }
  question.machine.disk = 0;
  question.pass.context = 1 << 17;
  question.sequences = 1;  // of a step: seven of eight data ranks would have none
  EXPECT_EQ(question.possible_widths(), (std::vector<int>{8}));
  const std::vector<Answer> answers = AnswerAll(question);
  const Answer* const fastest = Fastest(answers);
  ASSERT_NE(fastest, nullptr);
  EXPECT_EQ(fastest->choice.tensor, 8);
  EXPECT_THAT(WordsOf(*fastest), HasSubstr("8 tensor ranks, stage"));
  EXPECT_THAT(fastest->config.ToJson(), HasSubstr("\"tensor\": 8"));
}

// The fastest line is that of the best width: no width alone has a faster one.
TEST(TensorRanks, NoWidthAloneIsFasterThanTheSearch) {
  Question all = QuestionOf("llama-2-13b", "8xrtx4090", 8, {1, 2, 4});
  all.sequences = 16;
  all.machine.disk = 0;  // its plans take longer
  const std::vector<Answer> answers = AnswerAll(all);
  const Answer* const fastest = Fastest(answers);
  ASSERT_NE(fastest, nullptr);
  for (const int width : {1, 2, 4}) {
    Question one = QuestionOf("llama-2-13b", "8xrtx4090", 8, {width});
    one.sequences = 16;
    one.machine.disk = 0;
    const std::vector<Answer> of_width = AnswerAll(one);
    const Answer* const best = Fastest(of_width);
    EXPECT_LE(best == nullptr ? 0 : SpeedOf(*best), SpeedOf(*fastest) * kWorthIt) << width;
  }
}

// The blocks of adapters are those of their matrices, also of three that are one in files.
TEST(TensorRanks, ShareAdapters) {
  for (const char* name : {"llama-3-8b", "gpt2", "mixtral-8x7b"}) {
    const ModelShape shape = *ShapeOfName(name);
    ASSERT_OK_AND_ASSIGN(const Model model, WithAdapters(ModelOf(shape, 2), {.rank = 8}));
    ASSERT_OK_AND_ASSIGN(const ModelSpec spec, SpecOf(model, {.context = 64}));
    SCOPED_TRACE(name);
    EXPECT_OK(Validate(spec));
    EXPECT_OK(ebb::WithBlocks(spec, /*rank=*/1, /*ranks=*/2).status());
    for (const ParameterSpec& parameter : spec.parameters) {
      if (parameter.name.find("lora_") == std::string::npos) continue;
      EXPECT_NE(parameter.split.has_value(), parameter.sums_gradient) << parameter.name;
    }
  }
}

TEST(TensorRanks, MuonIsRefused) {
  Question question = QuestionOf("llama-2-7b", "8xh100", 8, {2});
  question.config.optimizer.type = OptimizerType::kMuon;
  const Answer answer = AnswerFor(question, Choice{.stage = 1, .tensor = 2}, Depth::kMemory);
  EXPECT_THAT(answer.refused.message(), HasSubstr("is a part of a matrix"));
}

TEST(TensorRanks, MachinesAreComparedWithTheirWidths) {
  Question question = QuestionOf("llama-3-8b", "8xh100", 8, {4});
  question.sequences = 64;
  Offer offer{.machine = *MachineOfName("8xh100"), .price_an_hour = 6};
  offer.machine.gpus = 2;
  offer.machine.disk = 0;
  FillOffer(question, offer);
  ASSERT_TRUE(offer.answer) << offer.lacks;
  EXPECT_EQ(offer.hosts % 2, 0);  // two hosts have the four tensor ranks
  EXPECT_EQ(offer.answer->choice.tensor, 4);
}

}  // namespace
}  // namespace ebb::planner::tensor_ranks_test
