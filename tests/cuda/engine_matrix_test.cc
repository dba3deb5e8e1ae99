// The bitwise matrix on GPUs: engines with their state on a CUDA device, on ranks that are threads
// and share it. They have the bits of the CPU over `local`, and over NCCL with
// ebb.deterministic_reduce. Otherwise NCCL rounds partial sums, so cells have the bits of a
// reference over NCCL. On a device NCCL's order of three or more addends depends on the collective
// and on what else is in it, so from three ranks on a reference has the cell's collectives.
//
// Each cell runs on one kind of ranks, and every setting on each kind. EBB_FULL=1: on all kinds.
//
// It runs on the stand-in, and on a device if there is one. There cells over NCCL have fewer ranks,
// or offload nothing, if they have more streams than the device has queues (docs/ranks.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "nccl_shares_device.h"
#include "tests/engine/covering_array.h"
#include "tests/engine/matrix_cell.h"
#include "tests/full.h"
#include "tests/status.h"

namespace ebb::testing {
namespace {

enum class Ranks { kLocal, kNccl, kDeterministicNccl };
constexpr int kKinds = 3;

// The last axis: the kind of ranks.
const std::vector<std::vector<int>>& Rows() {
  static const std::vector<std::vector<int>> rows = [] {
    std::vector<int> levels = LevelCounts();
    levels.push_back(kKinds);
    return PairwiseCoveringArray(levels);
  }();
  return rows;
}

// The last device, because CUDA takes the first by default: no work of an engine may get there.
absl::StatusOr<Device> LastDevice() {
  EBB_ASSIGN_OR_RETURN(const int devices, Device::CudaDevices());
  return Device::Cuda(devices - 1);
}

absl::StatusOr<Outcome> RunOnGpu(const Cell& cell, Ranks ranks) {
  const NcclSharesDevice nccl(ranks != Ranks::kLocal);
  return RunCell(cell, &LastDevice, ranks == Ranks::kDeterministicNccl);
}

Cell ReferenceOf(const Cell& cell, Ranks ranks) {
  const Cell reference = cell.Reference();
  if (ranks != Ranks::kNccl || cell.world() <= 2 || nccl_sums_in_one_order) return reference;
  Cell plain = cell;
  for (const Axis axis : {kPrefetch, kUpdate, kReshard, kBetween, kParameters, kOptimizer,
                          kGradients, kActivations, kFasterShare, kMasters, kDisk, kReports})
    plain[axis] = reference[axis];
  return plain;
}

const absl::StatusOr<Outcome>& ReferenceOutcome(const Cell& cell, Ranks ranks) {
  static std::map<std::pair<Cell, Ranks>, absl::StatusOr<Outcome>> outcomes;
  const std::pair key(ReferenceOf(cell, ranks), ranks);
  const auto known = outcomes.find(key);
  if (known != outcomes.end()) return known->second;
  // A GPU's products of matrices have other bits than the CPU's. The stand-in's have the same.
  const bool own_products = cell.updates_matrices() && !nccl_sums_in_one_order;
  const bool on_gpu = ranks == Ranks::kNccl || own_products;
  return outcomes.emplace(key, on_gpu ? RunOnGpu(key.first, ranks) : RunCell(key.first))
      .first->second;
}

// Before version 2.30 NCCL takes one rank for each device.
const absl::Status& NcclCanShareDevice() {
  static const absl::Status shares = [] {
    const NcclSharesDevice nccl;
    return RunThreads(2, [](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Device device, LastDevice());
      EBB_ASSIGN_OR_RETURN(const World gpus, world.On(device));
      return gpus.NewCommunicator({.timeout_seconds = 30}).status();
    });
  }();
  return shares;
}

// The queues of the hardware, over which all streams of a process on one device are spread.
int Queues() {
  const char* const given = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return given == nullptr ? 8 : std::atoi(given);
}

// One rank's streams: the engine's, and NCCL's for the communicators of control, gathers and
// reductions, and two more between replicas, or one more of gathers within groups.
int Streams(const Cell& cell) {
  const Config config = cell.MakeConfig();
  const bool offloads = config.parameter_tier() != Tier::kDevice ||
                        config.optimizer_tier() != Tier::kDevice ||
                        (cell[kBoundaries] == 1 && config.activation_tier() != Tier::kDevice);
  return (offloads ? 15 : 5) + (cell.shard_group() == 0 ? 3 : 5) + (cell.has_secondary() ? 1 : 0);
}

// Over NCCL, streams that share a queue might wait for each other in a circle. So the cell gets
// fewer ranks; or, if two ranks are too many, it offloads nothing. False: even that has too many
// streams.
bool FitQueues(Cell& cell) {
  if (cell.world() == 1) return true;
  const auto fits = [&](int ranks) { return ranks * Streams(cell) <= Queues(); };
  if (!fits(2)) cell[kParameters] = cell[kOptimizer] = cell[kActivations] = 0;
  while (cell.world() > 2 && !fits(cell.world())) --cell[kWorld];
  return fits(cell.world());
}

// EBB_SEED=n selects other cells.
uint64_t Seed() {
  const char* given = std::getenv("EBB_SEED");
  return given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
}

class EngineOnGpuTest : public ::testing::TestWithParam<std::tuple<Ranks, int>> {
 protected:
  static void SetUpTestSuite() {
    setenv("EBB_LOG_LEVEL", "error", /*overwrite=*/0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  }

  void ExpectBitsOfReference(Cell cell) {
    if (const auto device = LastDevice(); !device.ok()) GTEST_SKIP() << device.status();
    const Ranks ranks = std::get<0>(GetParam());
    if (ranks != Ranks::kLocal && !FitQueues(cell)) {
      GTEST_SKIP() << cell.world() << " ranks with " << Streams(cell) << " streams each on "
                   << Queues() << " queues of one device: " << cell.Describe();
    }
    if (ranks != Ranks::kLocal && !NcclCanShareDevice().ok()) GTEST_SKIP() << NcclCanShareDevice();
    SCOPED_TRACE(cell.Describe());
    const absl::StatusOr<Outcome>& reference = ReferenceOutcome(cell, ranks);
    ASSERT_OK(reference);
    ASSERT_OK_AND_ASSIGN(const Outcome outcome, RunOnGpu(cell, ranks));
    EXPECT_EQ(FirstDifference(outcome, *reference), "");
  }
};

class PairsOfSettings : public EngineOnGpuTest {};
TEST_P(PairsOfSettings, HaveTheBitsOfTheirReference) {
  Cell cell;
  const std::vector<int>& levels = Rows()[static_cast<size_t>(std::get<1>(GetParam()))];
  std::copy_n(levels.begin(), cell.levels.size(), cell.levels.begin());
  ExpectBitsOfReference(cell);
}

class RandomSettings : public EngineOnGpuTest {};
TEST_P(RandomSettings, HaveTheBitsOfTheirReference) {
  ExpectBitsOfReference(RandomCell(Seed() * 1000 + static_cast<uint64_t>(std::get<1>(GetParam()))));
}

class RandomEarlySettings : public EngineOnGpuTest {};
TEST_P(RandomEarlySettings, HaveTheBitsOfTheirReference) {
  ExpectBitsOfReference(
      RandomEarlyCell(Seed() * 1000 + static_cast<uint64_t>(std::get<1>(GetParam()))));
}

auto Cells(int count, int (*kind_of)(int cell)) {
  std::vector<std::tuple<Ranks, int>> cells;
  for (int cell = 0; cell < count; ++cell) {
    for (int kind = 0; kind < kKinds; ++kind) {
      if (kind == kind_of(cell) || Full()) cells.emplace_back(static_cast<Ranks>(kind), cell);
    }
  }
  return ::testing::ValuesIn(cells);
}
int KindOfRow(int row) {
  return Rows()[static_cast<size_t>(row)].back();
}
int KindByTurns(int cell) {
  return cell % kKinds;
}
const auto kName = [](const ::testing::TestParamInfo<std::tuple<Ranks, int>>& param) {
  constexpr const char* kRanks[] = {"local_", "nccl_", "deterministic_nccl_"};
  return kRanks[static_cast<int>(std::get<0>(param.param))] +
         std::to_string(std::get<1>(param.param));
};
INSTANTIATE_TEST_SUITE_P(Gpu, PairsOfSettings, Cells(static_cast<int>(Rows().size()), &KindOfRow),
                         kName);
INSTANTIATE_TEST_SUITE_P(Gpu, RandomSettings, Cells(20, &KindByTurns), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, RandomEarlySettings, Cells(6, &KindByTurns), kName);

}  // namespace
}  // namespace ebb::testing
