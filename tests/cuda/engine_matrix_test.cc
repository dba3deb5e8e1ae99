// The bitwise matrix on GPUs: engines whose state lives on a CUDA device, their ranks threads that
// share it. Over `local` they have the bits of the CPU; NCCL multiplies with the scale before it
// sums, and in an order of its own, so over NCCL cells have the bits of their reference over NCCL.
//
// On the stand-in everywhere, on a device where there is one. Offload stays on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "tests/engine/covering_array.h"
#include "tests/engine/matrix_cell.h"

namespace ebb::testing {
namespace {

enum class Ranks { kLocal, kNccl };

std::vector<int> LevelsOnDevice() {
  std::vector<int> levels = LevelCounts();
  for (const Axis axis : {kParameters, kOptimizer, kGradients, kActivations, kFasterShare, kDisk})
    levels[axis] = 1;
  return levels;
}

const std::vector<std::vector<int>>& Rows() {
  static const std::vector<std::vector<int>> rows = PairwiseCoveringArray(LevelsOnDevice());
  return rows;
}

// Chosen by World::On when the communicators are made.
class SharedDevice {
 public:
  explicit SharedDevice(Ranks ranks) {
    if (ranks == Ranks::kNccl) setenv(kName, "1", /*overwrite=*/1);
  }
  ~SharedDevice() { unsetenv(kName); }

 private:
  static constexpr char kName[] = "NCCL_MULTI_RANK_GPU_ENABLE";
};

absl::StatusOr<Outcome> RunOnGpu(const Cell& cell, Ranks ranks) {
  const SharedDevice shared(ranks);
  return RunCell(cell, [] { return Device::Cuda(); });
}

const absl::StatusOr<Outcome>& ReferenceOutcome(const Cell& cell, Ranks ranks) {
  static std::map<std::pair<Cell, Ranks>, absl::StatusOr<Outcome>> outcomes;
  const std::pair key(cell.Reference(), ranks);
  const auto known = outcomes.find(key);
  if (known != outcomes.end()) return known->second;
  return outcomes
      .emplace(key, ranks == Ranks::kLocal ? RunCell(key.first) : RunOnGpu(key.first, ranks))
      .first->second;
}

class EngineOnGpuTest : public ::testing::TestWithParam<std::tuple<Ranks, int>> {
 protected:
  static void SetUpTestSuite() { setenv("EBB_LOG_LEVEL", "error", /*overwrite=*/0); }
};

TEST_P(EngineOnGpuTest, CellHasTheBitsOfItsReference) {
  if (const auto device = Device::Cuda(); !device.ok()) GTEST_SKIP() << device.status();
  const auto [ranks, row] = GetParam();
  Cell cell;
  const std::vector<int>& levels = Rows()[static_cast<size_t>(row)];
  std::copy(levels.begin(), levels.end(), cell.levels.begin());
  SCOPED_TRACE(cell.Describe());
  const absl::StatusOr<Outcome>& reference = ReferenceOutcome(cell, ranks);
  ASSERT_TRUE(reference.ok()) << reference.status();
  const absl::StatusOr<Outcome> outcome = RunOnGpu(cell, ranks);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(FirstDifference(*outcome, *reference), "");
}

INSTANTIATE_TEST_SUITE_P(Pairwise, EngineOnGpuTest,
                         ::testing::Combine(::testing::Values(Ranks::kLocal, Ranks::kNccl),
                                            ::testing::Range(0, static_cast<int>(Rows().size()))),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param) == Ranks::kLocal ? "local_"
                                                                                        : "nccl_") +
                                  std::to_string(std::get<1>(param.param));
                         });

}  // namespace
}  // namespace ebb::testing
