// gpt with layers that are cut over tensor ranks, beside the same run with whole layers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "command_line/configuration.h"
#include "ops_fixture.h"
#include "report/tables.h"
#include "scratch_files.h"
#include "stop.h"
#include "tests/full.h"
#include "tests/trace/trace_events.h"
#include "trainer.h"
#include "training.h"

namespace ebb::gpt {
namespace {

// Six heads and 257 rows of the table divide by 2, 3 or neither.
constexpr GptShape kShape = {.layers = 2, .heads = 6, .context = 12, .vocabulary = 257};

// A run of 24 samples a step over two data ranks.
SmallRun Cut(int tensor, bool sequence_parallel = false) {
  return {.ranks = 2 * tensor,
          .stage = 1,
          .steps = 20,
          .micro_batch = 2,
          .width = 48,
          .shape = kShape,
          .tensor = tensor,
          .sequence_parallel = sequence_parallel,
          .clipping = 0.5};
}

std::string NameOf(const SmallRun& recipe) {
  return absl::StrCat("tensor ", recipe.tensor, " sequence parallel ", recipe.sequence_parallel,
                      " stage ", recipe.stage, " parameters ", static_cast<int>(recipe.parameters),
                      " states ", static_cast<int>(recipe.states), " recompute ", recipe.recompute,
                      " ", recipe.ebb);
}

double LargestRelativeDifference(const nlohmann::json& a, const nlohmann::json& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double x = a[i].get<double>(), y = b[i].get<double>();
    largest = std::max(largest, std::abs(x - y) / std::abs(y));
  }
  return largest;
}

// That a rank's layers have received from other tensor ranks in the last step; 0: there is no row.
int64_t TensorBytes(const nlohmann::json& summary) {
  for (const auto& row : summary["communication"])
    if (row["operation"] == "tensor") return row["bytes"].get<int64_t>();
  return 0;
}

TEST(TensorTraining, LossesAndNormsAreThoseOfWholeLayers) {
  const nlohmann::json whole = Train(Cut(1));
  EXPECT_EQ(TensorBytes(whole), 0);
  ASSERT_EQ(whole["losses"].size(), 20u);
  for (const int tensor : {2, 3, 4}) {
    for (const bool sequence_parallel : {false, true}) {
      const SmallRun recipe = Cut(tensor, sequence_parallel);
      SCOPED_TRACE(NameOf(recipe));
      const nlohmann::json cut = Train(recipe);
      EXPECT_LT(LargestRelativeDifference(cut["losses"], whole["losses"]), 1e-5);
      EXPECT_LT(LargestRelativeDifference(cut["gradient_norms"], whole["gradient_norms"]), 1e-5);
      EXPECT_NEAR(cut["held_out"][0]["loss"].get<double>(),
                  whole["held_out"][0]["loss"].get<double>(), 1e-4);
      EXPECT_EQ(cut["tokens_per_step"], whole["tokens_per_step"]);
      EXPECT_EQ(cut["parameters"], whole["parameters"]);
      ExpectMemoryAsPredicted(cut);
      EXPECT_GT(TensorBytes(cut), 0);
      ExpectCommunicationAsPredicted(cut);
    }
  }
}

// Each is inside of the span of a scope, or between two.
TEST(TensorTraining, CollectivesOfLayersAreSpansOfTheComputeLine) {
  for (const bool sequence_parallel : {false, true}) {
    const ScratchFiles files;
    const std::string path = files.Path("trace.json");
    SmallRun recipe = Cut(2, sequence_parallel);
    recipe.steps = 2;
    recipe.ebb = absl::StrCat(R"({"trace": ")", path, "\"}");
    const nlohmann::json summary = Train(recipe);
    const auto tracks = ReadTraceEvents(path);
    ASSERT_TRUE(tracks.ok()) << tracks.status();
    std::set<std::string> names;
    std::map<int64_t, int64_t> bytes;  // of the second step, by rank
    for (const auto& [id, track] : *tracks) {
      if (track.name != "compute") continue;
      for (const TraceSpan& span : track.spans) {
        if (!span.name.starts_with("All") && !span.name.starts_with("ReduceScatter")) continue;
        names.insert(span.name);
        if (span.step == 2) bytes[id.first] += span.bytes;
      }
    }
    EXPECT_EQ(bytes.size(), 4u);
    for (const auto& [rank, of_rank] : bytes) EXPECT_EQ(of_rank, TensorBytes(summary)) << rank;
    EXPECT_TRUE(names.contains("AllReduce embedding"));
    for (const char* block : {" block0", " block1"}) {
      EXPECT_NE(names.contains(absl::StrCat("AllReduce", block)), sequence_parallel);
      EXPECT_EQ(names.contains(absl::StrCat("AllGather", block)), sequence_parallel);
      EXPECT_EQ(names.contains(absl::StrCat("ReduceScatter", block)), sequence_parallel);
    }
  }
}

// Before the first step nothing has been added in another order.
TEST(TensorTraining, InitialValuesAreThoseOfWholeLayers) {
  SmallRun whole = Cut(1), cut = Cut(4);
  whole.steps = cut.steps = 0;
  EXPECT_EQ(Digest(cut), Digest(whole));
}

class TensorDevicesTest : public DeviceRunsTest {
 protected:
  static SmallRun ShortRun(int tensor, bool sequence_parallel = false) {
    SmallRun recipe = OnDevice(Cut(tensor, sequence_parallel));
    recipe.steps = 3;
    return recipe;
  }
};

// Rounding of activations changes with the sums' order, so 16 bits are compared loosely.
TEST_P(TensorDevicesTest, FollowsWholeLayers) {
  const nlohmann::json whole = Train(ShortRun(1));
  const double bound = GetParam().compute == DType::kFloat32 ? 1e-5 : 2e-2;
  for (const bool sequence_parallel : {false, true}) {
    const nlohmann::json cut = Train(ShortRun(2, sequence_parallel));
    EXPECT_LT(LargestRelativeDifference(cut["losses"], whole["losses"]), bound);
    EXPECT_LT(LargestRelativeDifference(cut["gradient_norms"], whole["gradient_norms"]), 5 * bound);
  }
}

TEST_P(TensorDevicesTest, EveryStageAndTierTrainsToTheSameBits) {
  using enum Tier;
  for (const bool sequence_parallel : {false, true}) {
    // Kernels of a GPU take long on the stand-in.
    if (GetParam().kind == DeviceKind::kCuda && !sequence_parallel && !ebb::testing::Full())
      continue;
    SmallRun alone = ShortRun(2, sequence_parallel);
    alone.stage = 0;
    alone.accumulation = 2;
    alone.ebb = R"({"reduce_at": "step"})";
    const nlohmann::json expected = Train(alone);
    struct Case {
      int stage;
      Tier parameters, states;
      bool recompute, layer_major;
    };
    for (const Case& c : {Case{1, kDevice, kNvme, false, false},
                          {2, kDevice, kCpu, true, false},
                          {3, kDevice, kDevice, false, true},
                          {3, kCpu, kDevice, true, true},
                          {3, kNvme, kNvme, false, false}}) {
      SmallRun recipe = alone;
      recipe.stage = c.stage, recipe.parameters = c.parameters, recipe.states = c.states;
      recipe.recompute = c.recompute;
      if (c.layer_major) recipe.ebb = R"({"reduce_at": "step", "micro_batches_per_round": "all"})";
      SCOPED_TRACE(NameOf(recipe));
      ExpectSameAsPredicted(Train(recipe), expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, TensorDevicesTest, ::testing::ValuesIn(OpsCases()), OpsTestName);

// A sum in rank order has the same bits, whether each rank keeps all of it or its own rows.
TEST(TensorTraining, SequenceParallelForwardHasTheBitsOfThePlainOne) {
  SmallRun plain = Cut(2), divided = Cut(2, /*sequence_parallel=*/true);
  plain.steps = divided.steps = 1;
  const nlohmann::json whole = Train(plain), parts = Train(divided);
  EXPECT_EQ(parts["losses"], whole["losses"]);
  // Each rank has the activations of its own rows.
  const auto device_bytes = [](const nlohmann::json& summary, const char* name) {
    for (const auto& row : summary["memory"])
      if (row["class"] == name) return row["predicted_bytes"].get<int64_t>();
    return int64_t{0};
  };
  EXPECT_LT(device_bytes(parts, "activation"), device_bytes(whole, "activation"));
}

// A sample after some steps, and parameters.
struct Trained {
  std::mutex mutex;
  std::string sample;
  // By rank: the values of each parameter that is whole over tensor, by name and first element.
  std::map<int, std::map<std::pair<std::string, int64_t>, std::vector<float>>> whole;
};

void TrainInto(const SmallRun& recipe, int64_t sample_bytes, Trained& trained) {
  RunRanks(recipe, [&](const World& world, const gpt::Run& run) -> absl::Status {
    auto trainer = Trainer::Create(world, Device::Cpu(1), run.options, run.config, run.text);
    if (!trainer.ok()) return trainer.status();
    const auto ignore = [](const StepReport&) {};
    for (int64_t step = 0; step < recipe.steps; ++step) {
      if (absl::Status done = (*trainer)->Step(step, ignore); !done.ok()) return done;
    }
    if (absl::Status done = (*trainer)->AwaitReport(ignore); !done.ok()) return done;
    auto vote = StopVote::Create(world, Device::Cpu(), run.config.ebb.timeout_seconds);
    if (!vote.ok()) return vote.status();
    const auto sample = (*trainer)->Sample("the ", sample_bytes, **vote);
    if (!sample.ok()) return sample.status();
    const std::lock_guard lock(trained.mutex);
    if (world.rank() == 0) trained.sample = *sample;
    const ModelSpec& model = (*trainer)->model();
    for (size_t p = 0; p < model.parameters.size(); ++p) {
      if (model.parameters[p].split) continue;
      const absl::Status read = (*trainer)->engine().Read(
          static_cast<ParameterId>(p), StateClass::kMaster,
          [&](const Slice& slice, std::span<const float> values) {
            trained.whole[world.rank()][{std::string(slice.name), slice.begin}] = {values.begin(),
                                                                                   values.end()};
            return absl::OkStatus();
          });
      if (!read.ok()) return read;
    }
    return absl::OkStatus();
  });
}

TEST(TensorTraining, ReplicasAreEqualAfterManyClippedSteps) {
  for (const bool sequence_parallel : {false, true}) {
    SmallRun recipe = Cut(2, sequence_parallel);
    recipe.steps = 50;
    recipe.clipping = 0.1;
    Trained trained;
    TrainInto(recipe, 0, trained);
    ASSERT_EQ(trained.whole.size(), 4u);
    for (const int rank : {0, 2}) {
      EXPECT_FALSE(trained.whole[rank].empty());
      EXPECT_EQ(trained.whole[rank], trained.whole[rank + 1]) << "rank " << rank;
    }
  }
}

// Also of prompts with fewer rows than tensor ranks, and with a remainder.
TEST(TensorTraining, SamplesAreThoseOfWholeLayers) {
  Trained whole;
  TrainInto(Cut(1), 20, whole);
  EXPECT_EQ(whole.sample.size(), 24u);
  for (const int tensor : {2, 4}) {
    for (const bool sequence_parallel : {false, true}) {
      Trained cut;
      TrainInto(Cut(tensor, sequence_parallel), 20, cut);
      EXPECT_EQ(cut.sample, whole.sample) << NameOf(Cut(tensor, sequence_parallel));
    }
  }
}

Options OfTensor(int64_t tensor, bool sequence_parallel = false) {
  Options options;
  options.ranks = 8;
  options.ranks_given = true;
  options.tensor = tensor;
  options.sequence_parallel = sequence_parallel;
  return options;
}

TEST(TensorOptions, WhatTensorRanksCannotShareIsRefused) {
  const auto refused = [](const Options& options) {
    return std::string(ResolveConfig(options).status().message());
  };
  using ::testing::HasSubstr;
  Options few_heads = OfTensor(4);
  few_heads.shape.heads = 3;
  EXPECT_THAT(refused(few_heads),
              HasSubstr("--tensor 4 cuts layers by heads, and --heads is 3: use "
                        "at most 3 tensor ranks"));
  Options uneven_rows = OfTensor(4, /*sequence_parallel=*/true);
  uneven_rows.shape.context = 30;
  EXPECT_THAT(refused(uneven_rows), HasSubstr("--context is 30: use a multiple of 4"));
  uneven_rows.sequence_parallel = false;
  EXPECT_EQ(refused(uneven_rows), "");
  Options graphs = OfTensor(2);
  graphs.cuda_graphs = CudaGraphs::kOn;
  EXPECT_THAT(refused(graphs), HasSubstr("--cuda-graphs on with --tensor 2"));
  graphs.tensor = 1;
  EXPECT_EQ(refused(graphs), "");
  EXPECT_EQ(refused(OfTensor(3)),
            "--tensor 3 (ebb.mesh.tensor) does not divide 8 ranks: every 3 ranks share each layer, "
            "so use a multiple of 3 ranks");
  Options ranks_follow = OfTensor(3);
  ranks_follow.ranks_given = false;
  EXPECT_EQ(refused(ranks_follow), "");
  EXPECT_EQ(RanksOf(*ResolveConfig(ranks_follow)), 6);
  ranks_follow.ranks = 2;  // fewer than one data rank needs
  EXPECT_EQ(RanksOf(*ResolveConfig(ranks_follow)), 3);
  const ScratchFiles files;
  Options muon = OfTensor(2);
  muon.config_file = files.Write(
      "muon.json",
      R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Muon", "params": {}}})");
  EXPECT_THAT(refused(muon), HasSubstr("--tensor 2 (ebb.mesh.tensor) cuts them"));
  EXPECT_EQ(refused(OfTensor(4, /*sequence_parallel=*/true)), "");
}

TEST(TensorOptions, RanksAreCountedByAxis) {
  Options options = OfTensor(4);
  options.batch = 2;
  const auto config = ResolveConfig(options);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->train_batch_size, 4);
  EXPECT_EQ(RanksOf(*config), 8);
  EXPECT_EQ(RanksText(options, *config), "8 ranks: 2 data x 4 tensor");
}

TEST(TensorOptions, ThePlanNamesTheAxesAndTheirBytes) {
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  Options options = OfTensor(4);
  options.show_plan = ShowPlan::kOperations;
  const auto plan = PlanningText(options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(*plan, AllOf(HasSubstr("8 ranks: 2 data x 4 tensor on the CPU"),
                           HasSubstr("Plan of a step: 8 ranks (2 data x 4 tensor), stage 3"),
                           HasSubstr("\"block0 [whole]\" are the parameters of block0 that each"),
                           ::testing::ContainsRegex("\ntensor +[1-9]")));
  options.tensor = 1;
  const auto whole = PlanningText(options);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_THAT(*whole,
              AllOf(HasSubstr("Plan of a step: 8 ranks, stage 3"),
                    ::testing::Not(HasSubstr("[whole]")), ::testing::Not(HasSubstr("\ntensor "))));
}

// Its plan is that of a model that says nothing of tensor ranks.
TEST(TensorOptions, OneTensorRankDeclaresNoSplit) {
  const Options options = OfTensor(1, /*sequence_parallel=*/true);
  const auto config = ResolveConfig(options);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto work = WorkloadOf(options, *config, Processor(DeviceKind::kCpu, 1));
  ASSERT_TRUE(work.ok()) << work.status();
  EXPECT_FALSE(work->spec.has_splits());
  for (const ParameterSpec& parameter : work->spec.parameters)
    EXPECT_FALSE(parameter.sums_gradient) << parameter.name;
}

// The engine cuts the parameters by itself, so both must cut alike.
TEST(TensorShares, AreTheBlocksOfTheEngine) {
  for (const int ranks : {2, 3, 4, 6}) {
    for (const bool sequence_parallel : {false, true}) {
      SmallRun recipe = Cut(ranks, sequence_parallel);
      RunRanks(recipe, [&](const World& world, const gpt::Run& run) -> absl::Status {
        auto trainer = Trainer::Create(world, Device::Cpu(1), run.options, run.config, run.text);
        if (!trainer.ok()) return trainer.status();
        const TensorShare share = ShareOf(run.options.shape, world.rank() % ranks, ranks);
        const int64_t width = run.options.shape.width;
        ModelSpec spec;
        const Gpt gpt = Declare({.shape = run.options.shape}, spec);
        const auto shape_of = [&](ParameterId id) {
          std::vector<int64_t> shape;
          for (const UnitId unit : {gpt.embedding, gpt.blocks[1].unit})
            for (const ParameterView& view : (*trainer)->engine().Views(unit))
              if (view.parameter == id)
                shape.assign(view.value.shape.begin(), view.value.shape.end());
          return shape;
        };
        EXPECT_EQ(shape_of(gpt.tokens), (std::vector<int64_t>{share.vocabulary, width}));
        EXPECT_EQ(shape_of(gpt.blocks[1].qkv.weight),
                  (std::vector<int64_t>{3 * share.width, width}));
        EXPECT_EQ(shape_of(gpt.blocks[1].projection.weight),
                  (std::vector<int64_t>{width, share.width}));
        EXPECT_EQ(shape_of(gpt.blocks[1].up.bias), (std::vector<int64_t>{share.hidden}));
        EXPECT_EQ(shape_of(gpt.blocks[1].down.weight), (std::vector<int64_t>{width, share.hidden}));
        EXPECT_EQ(shape_of(gpt.norm.weight), (std::vector<int64_t>{width}));
        return absl::OkStatus();
      });
    }
  }
}

}  // namespace
}  // namespace ebb::gpt
