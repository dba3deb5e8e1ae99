// The trainer through the engine: the stage, the order of micro-batches and the kept activations do
// not change the bits.
#include "training.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/resident_set.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "ops_fixture.h"
#include "scratch_files.h"
#include "stop.h"
#include "tests/full.h"

namespace ebb::gpt {
namespace {

class TrainingTest : public DeviceRunsTest {};

TEST_P(TrainingTest, EveryStageTrainsToTheSameBits) {
  const nlohmann::json expected = Train(OnDevice({.stage = 0}));
  for (int stage : {1, 2, 3}) {
    const nlohmann::json summary = Train(OnDevice({.stage = stage}));
    EXPECT_EQ(summary["parameter_digest"], expected["parameter_digest"]) << "stage " << stage;
    EXPECT_EQ(summary["losses"], expected["losses"]) << "stage " << stage;
  }
}

TEST_P(TrainingTest, RecomputingTrainsToTheSameBits) {
  EXPECT_EQ(Digest(OnDevice({.recompute = true})), Digest(OnDevice({})));
}

TEST_P(TrainingTest, LayerMajorTrainsToTheSameBits) {
  SmallRun recipe = OnDevice({.steps = 2, .accumulation = 4, .ebb = R"({"reduce_at": "step"})"});
  const std::string expected = Digest(recipe);
  for (const bool all : {false, true}) {
    for (const bool recompute : {false, true}) {
      if (GetParam().kind == DeviceKind::kCuda && recompute == all && !ebb::testing::Full())
        continue;
      recipe.ebb = absl::StrCat(R"({"reduce_at": "step", "micro_batches_per_round": )",
                                all ? R"("all")" : "2", "}");
      recipe.recompute = recompute;
      EXPECT_EQ(Digest(recipe), expected) << recipe.ebb << " recompute " << recompute;
    }
  }
}

TEST_P(TrainingTest, CudaGraphsTrainToTheSameBits) {
  const SmallRun plain = {.stage = 3},
                 once_a_step = {.steps = 2, .accumulation = 2, .ebb = R"({"reduce_at": "step"})"},
                 recompute = {.steps = 2, .accumulation = 2, .recompute = true},
                 layer_major = {.steps = 2,
                                .accumulation = 2,
                                .recompute = true,
                                .ebb =
                                    R"({"reduce_at": "step", "micro_batches_per_round": "all"})"},
                 one_rank = {
                     .ranks = 1, .stage = 0, .steps = 2, .micro_batch = 2, .accumulation = 2};
  for (const SmallRun& each : {plain, once_a_step, recompute, layer_major, one_rank}) {
    SmallRun recipe = OnDevice(each);
    SCOPED_TRACE(::testing::Message() << recipe.ebb << ", accumulation " << recipe.accumulation
                                      << ", recompute " << recipe.recompute);
    const nlohmann::json expected = Train(recipe);
    EXPECT_FALSE(expected.contains("cuda_graphs"));
    recipe.graphs = CudaGraphs::kOn;
    const nlohmann::json summary = Train(recipe);
    EXPECT_EQ(summary["parameter_digest"], expected["parameter_digest"]);
    EXPECT_EQ(summary["losses"], expected["losses"]);
    EXPECT_EQ(summary["held_out"], expected["held_out"]);
    if (GetParam().kind == DeviceKind::kCpu) {
      EXPECT_FALSE(summary.contains("cuda_graphs"));
      continue;
    }
    const nlohmann::json& graphs = summary["cuda_graphs"];
    EXPECT_EQ(graphs["given_up"], "");
    EXPECT_LE(graphs["kept"], graphs["most"]);
    // From the second step on every pass over a block is a graph launch; the evaluation's walks may
    // be.
    const int64_t layers = 2, passes = recipe.recompute ? 3 : 2;
    EXPECT_GE(graphs["launches"], (recipe.steps - 1) * recipe.accumulation * layers * passes);
    EXPECT_GE(graphs["kept"], layers * passes);
  }
}

TEST_P(TrainingTest, ChoosingCudaGraphsByMeasurementChangesNoBit) {
  SmallRun recipe = OnDevice({});
  const std::string expected = Digest(recipe);
  recipe.graphs = CudaGraphs::kAuto;
  EXPECT_EQ(Digest(recipe), expected);
}

TEST_P(TrainingTest, EveryTierTrainsToTheSameBits) {
  SmallRun recipe = OnDevice({.steps = 3, .accumulation = 2, .width = 32});
  const bool cuda = GetParam().kind == DeviceKind::kCuda;
  for (const bool layer_major : {false, true}) {
    recipe.ebb = layer_major ? R"({"micro_batches_per_round": "all"})" : "{}";
    recipe.split_master = false;
    recipe.parameters = recipe.states = Tier::kDevice;
    const nlohmann::json expected = Train(recipe);
    EXPECT_TRUE(expected["traffic"].empty());
    ExpectMemoryAsPredicted(expected);
    for (const bool split_master : {false, true}) {
      if (split_master && GetParam().compute != DType::kBFloat16) continue;
      for (const Tier parameters : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
        for (const Tier states : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
          recipe.parameters = parameters, recipe.states = states;
          recipe.split_master = split_master;
          const bool moves = parameters != Tier::kDevice || states != Tier::kDevice;
          if (!moves && !split_master) continue;
          if (cuda && parameters != states) continue;  // the engine's matrix has them all
          // Every two of tier, split and order: kernels of a GPU take long on the stand-in.
          const int number = static_cast<int>(states) + split_master + layer_major;
          if (cuda && number % 2 == 0 && !ebb::testing::Full()) continue;
          SCOPED_TRACE(::testing::Message()
                       << "parameters " << Name(parameters) << ", states " << Name(states)
                       << ", split " << split_master << recipe.ebb);
          const nlohmann::json summary = Train(recipe);
          ExpectSameAsPredicted(summary, expected);
          EXPECT_EQ(!summary["traffic"].empty(), moves);
        }
      }
    }
  }
}

// All devices take the same batches, with sums in another order and other algorithms: only rounding
// differs, and grows over the steps.
TEST_P(TrainingTest, EveryDeviceFollowsTheCpuInFp32) {
  const nlohmann::json expected = Train({.steps = 6, .accumulation = 2});
  const nlohmann::json summary = Train(OnDevice({.steps = 6, .accumulation = 2}));
  const double bound = 20 * std::max(Rounding(GetParam().compute), 1e-6);
  ASSERT_EQ(summary["losses"].size(), expected["losses"].size());
  for (size_t i = 0; i < expected["losses"].size(); ++i) {
    const double loss = expected["losses"][i];
    EXPECT_NEAR(summary["losses"][i].get<double>(), loss, bound * loss) << "step " << i;
  }
  EXPECT_NEAR(summary["held_out"][0]["loss"].get<double>(),
              expected["held_out"][0]["loss"].get<double>(), 5 * bound);
}

INSTANTIATE_TEST_SUITE_P(Devices, TrainingTest, ::testing::ValuesIn(OpsCases()), OpsTestName);

TEST(TrainingWithoutMasters, IsTheSameInEveryStageAndTierAndKeepsNone) {
  SmallRun recipe = {.stage = 0,
                     .dtype = DType::kBFloat16,
                     .steps = 4,
                     .accumulation = 2,
                     .width = 32,
                     .stochastic_rounding = true};
  const nlohmann::json expected = Train(recipe);
  recipe.stochastic_rounding = false;
  EXPECT_NE(Train(recipe)["parameter_digest"], expected["parameter_digest"]);
  recipe.stochastic_rounding = true;
  struct Case {
    int stage;
    Tier parameters, states;
  };
  using enum Tier;
  for (const Case& c : {Case{1, kDevice, kDevice},
                        {1, kDevice, kNvme},
                        {2, kDevice, kCpu},
                        {3, kDevice, kDevice},
                        {3, kCpu, kCpu},
                        {3, kNvme, kDevice},
                        {3, kCpu, kNvme},
                        {3, kNvme, kNvme}}) {
    SCOPED_TRACE(::testing::Message() << "stage " << c.stage << ", parameters "
                                      << Name(c.parameters) << ", states " << Name(c.states));
    recipe.stage = c.stage, recipe.parameters = c.parameters, recipe.states = c.states;
    recipe.ebb = c.stage >= 2 ? R"({"reduce_at": "step"})" : "{}";
    const nlohmann::json summary = Train(recipe);
    ExpectSameAsPredicted(summary, expected);
    for (const char* const table : {"memory", "traffic"})
      for (const auto& row : summary[table]) EXPECT_NE(row["class"], "master") << row;
  }
}

// Units are divided into parts. The embedding has two visits, and gpt fuses the second one's forward
// into its backward.
TEST(TrainingOfParts, IsTheSameInEveryStageAndTier) {
  struct Case {
    int stage;
    Tier parameters, states;
    bool recompute;
  };
  using enum Tier;
  for (const char* optimizer :
       {R"({"type": "AdamW", "params": {"states": "8bit", "min_8bit_size": 100}})",
        R"({"type": "Muon", "params": {}})"}) {
    const SmallRun alone = {.stage = 0, .optimizer = optimizer, .width = 32};
    const nlohmann::json expected = Train(alone);
    EXPECT_NE(expected["parameter_digest"], Digest({.stage = 0, .width = 32}));
    for (const Case& c : {Case{0, kDevice, kDevice, true},
                          {1, kDevice, kNvme, false},
                          {2, kDevice, kCpu, true},
                          {3, kDevice, kDevice, false},
                          {3, kNvme, kNvme, true}}) {
      SCOPED_TRACE(::testing::Message() << optimizer << ", stage " << c.stage);
      SmallRun recipe = alone;
      recipe.stage = c.stage, recipe.parameters = c.parameters, recipe.states = c.states;
      recipe.recompute = c.recompute;
      const nlohmann::json summary = Train(recipe);
      ExpectSameAsPredicted(summary, expected);
    }
  }
}

TEST(DigestOfTraining, DiffersIfTheRunsDiffer) {
  const std::string digest = Digest({});
  EXPECT_EQ(digest.size(), 64u);
  EXPECT_NE(digest, Digest({.steps = 4}));
  EXPECT_NE(digest, Digest({.seed = 2}));
  EXPECT_NE(digest, Digest({.learning_rate = 0.02}));
}

TEST(DigestOfTraining, InitialValuesHaveOneDigestInEveryWorldStageAndNumberOfThreads) {
  const std::string expected = Digest({.ranks = 1, .stage = 0, .steps = 0});
  EXPECT_EQ(expected, Digest({.ranks = 2, .stage = 3, .steps = 0}));
  EXPECT_EQ(expected, Digest({.ranks = 3, .stage = 1, .threads = 2, .steps = 0}));
  EXPECT_EQ(expected, Digest({.ranks = 4, .stage = 2, .dtype = DType::kBFloat16, .steps = 0}));
}

TEST(TrainerTest, AnyWorldDrawsTheSameGlobalBatch) {
  const nlohmann::json one = Train({.ranks = 1, .micro_batch = 4})["losses"];
  for (const SmallRun& recipe : {SmallRun{.ranks = 4},
                                 {.ranks = 2, .accumulation = 2},
                                 {.ranks = 1, .micro_batch = 2, .accumulation = 2}}) {
    const nlohmann::json losses = Train(recipe)["losses"];
    ASSERT_EQ(losses.size(), one.size());
    // Sums in another order: a few roundings, grown over three steps.
    for (size_t i = 0; i < one.size(); ++i)
      EXPECT_NEAR(losses[i].get<double>(), one[i].get<double>(), 1e-4) << i;
  }
}

TEST(TrainerTest, TheLossIsTheSameWithoutMasters) {
  SmallRun recipe = {.dtype = DType::kBFloat16, .steps = 60, .micro_batch = 4};
  const auto fall = [&] {
    const auto losses = Train(recipe)["losses"].get<std::vector<double>>();
    return losses.front() - std::accumulate(losses.end() - 10, losses.end(), 0.0) / 10;
  };
  const double with = fall();
  recipe.stochastic_rounding = true;
  // Within the noise of batches and other roundings: the last losses of three seeds differed by
  // 0.08.
  EXPECT_NEAR(fall(), with, 0.3);
  EXPECT_GT(with, 4);
}

TEST(TrainerTest, LossFallsAndTheSummaryHoldsTheRun) {
  const nlohmann::json summary =
      Train({.stage = 3, .dtype = DType::kBFloat16, .steps = 30, .micro_batch = 4});
  EXPECT_LT(summary["losses"].back(), summary["losses"].front().get<double>() - 1);
  EXPECT_EQ(summary["losses"].size(), 30u);
  EXPECT_EQ(summary["held_out"].size(), 1u);
  EXPECT_EQ(summary["config"]["zero_optimization"]["stage"], 3);
  EXPECT_GT(summary["tokens_per_second"], 0);
  ExpectMemoryAsPredicted(summary);
  for (const auto& row : summary["communication"])
    EXPECT_EQ(row["predicted_bytes"], row["bytes"]) << row;
}

TEST(TrainerTest, TheSummaryPredictsTheRamOfAllRanksOfTheProcess) {
  if (!ReadResidentSet()) GTEST_SKIP() << "/proc/self/status does not say what is resident";
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    const nlohmann::json summary =
        Train({.ranks = 2, .dtype = DType::kBFloat16, .parameters = tier, .states = tier});
    int64_t of_rank = summary["plan"]["bytes"];
    for (const auto& row : summary["memory"])
      if (row["tier"] != "nvme") of_rank += row["predicted_bytes"].get<int64_t>();
    const auto& resident = summary["resident"];
    const int64_t before = resident["before_bytes"], predicted = resident["predicted_bytes"];
    EXPECT_GT(before, 0);
    EXPECT_EQ(predicted - before, 2 * of_rank) << Name(tier);
    EXPECT_GE(resident["peak_bytes"], before);
  }
}

// The kernel's count for this process; nothing if it does not count.
struct DiskBytes {
  double read = 0, written = 0;
};
std::optional<DiskBytes> BytesOfThisProcess() {
  std::ifstream file("/proc/self/io");
  DiskBytes bytes;
  int found = 0;
  for (std::string name; file >> name;) {
    double value = 0;
    file >> value;
    if (name == "read_bytes:") bytes.read = value, ++found;
    if (name == "write_bytes:") bytes.written = value, ++found;
  }
  if (found < 2) return std::nullopt;
  return bytes;
}

// Whether transfers of files there bypass the cache, so that the kernel counts each of them.
bool TakesDirectIo(const std::string& folder) {
  struct statfs of_folder = {};
  if (statfs(folder.c_str(), &of_folder) != 0 || of_folder.f_type == TMPFS_MAGIC) return false;
  const int file = open((folder + "/probe").c_str(), O_CREAT | O_RDWR | O_DIRECT, 0600);
  if (file < 0) return false;
  close(file);
  return true;
}

TEST(TrafficOfTraining, OnNvmeEqualsTheKernelsCounts) {
  if (const ScratchFiles files; !TakesDirectIo(files.Path("")))
    GTEST_SKIP() << "no direct I/O in " << ::testing::TempDir() << "; set TEST_TMPDIR to a disk";
  if (!BytesOfThisProcess()) GTEST_SKIP() << "no /proc/self/io";
  for (const bool split_master : {false, true}) {
    SmallRun recipe = {.ranks = 1,
                       .dtype = DType::kBFloat16,
                       .width = 128,
                       .parameters = Tier::kNvme,
                       .states = Tier::kNvme,
                       .split_master = split_master};
    // Two runs differ only by so many steady steps.
    constexpr int64_t kFewer = 3, kMore = 9;
    DiskBytes counted[2];
    nlohmann::json summary;
    for (const int64_t steps : {kFewer, kMore}) {
      recipe.steps = steps;
      const DiskBytes before = *BytesOfThisProcess();
      summary = Train(recipe);
      const DiskBytes after = *BytesOfThisProcess();
      counted[steps == kMore] = {.read = after.read - before.read,
                                 .written = after.written - before.written};
    }
    DiskBytes rows;
    for (const auto& row : summary["traffic"]) {
      if (row["tier"] != "nvme") continue;
      (row["direction"] == "read" ? rows.read : rows.written) += row["bytes"].get<double>();
    }
    ASSERT_GT(rows.read, 0);
    const double steps = kMore - kFewer;
    EXPECT_NEAR((counted[1].read - counted[0].read) / steps / rows.read, 1, 0.02);
    EXPECT_NEAR((counted[1].written - counted[0].written) / steps / rows.written, 1, 0.02);
  }
}

// In a separate process, because a signal stays seen. The signal comes before the first step, and
// the evaluation after that step reads the step's vote.
TEST(StopDeathTest, ASignalDuringTheLastStepEndsTheRunInItsEvaluation) {
  const auto train_and_exit = [] {
    CatchStopSignals(/*before_time_is_up=*/false);
    std::raise(SIGINT);
    std::atomic<int> ranks_stopped = 0;
    const nlohmann::json summary = Train({.ranks = 3, .steps = 1}, &ranks_stopped);
    std::fprintf(stderr, "%d ranks stopped, %zu losses, %zu held out", ranks_stopped.load(),
                 summary["losses"].size(), summary["held_out"].size());
    std::exit(0);
  };
  EXPECT_EXIT(train_and_exit(), ::testing::ExitedWithCode(0),
              "3 ranks stopped, 1 losses, 0 held out");
}

}  // namespace
}  // namespace ebb::gpt
