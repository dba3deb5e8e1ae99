// State of a GPU that is read while later steps run, which the device does long after the host has
// enqueued them. The check of the order (order.h) is off: it does not see the waits of a host
// stream's task, so it would report the copies of the task as unordered.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <future>
#include <map>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "stand_in.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::engine_async_reads_test {
namespace {

constexpr int kRanks = 2, kSteps = 5, kReadAfter = 2;

// By class, state and parameter.
using State = std::map<std::tuple<StateClass, std::string, int>, std::vector<float>>;

void Add(State& all, StateClass what, std::string_view state, const Slice& slice,
         std::span<const float> values) {
  std::vector<float>& of = all[{what, std::string(state), static_cast<int>(slice.parameter)}];
  of.resize(static_cast<size_t>(Elements(slice.shape)));
  std::copy(values.begin(), values.end(), of.begin() + slice.begin);
}

struct Cell {
  Tier tier = Tier::kDevice;
  bool early = false, split = false;
};
std::ostream& operator<<(std::ostream& out, const Cell& of) {
  return out << std::string(Name(of.tier)) << (of.early ? "_early" : "_late")
             << (of.split ? "_split" : "");
}

class EngineAsyncReadsTest : public ::testing::TestWithParam<Cell> {
 protected:
  static void SetUpTestSuite() { setenv("EBB_LOG_LEVEL", "error", /*overwrite=*/0); }
  void TearDown() override { stand_in::Reset(); }

  struct Trained {
    State read;  // rank 0's, after kReadAfter steps
    std::vector<uint32_t> masters;
  };
  Trained Train(bool beside) const {
    Config config;
    config.micro_batch_size = 1;
    config.gradient_accumulation_steps = 2;
    config.compute = DType::kBFloat16;
    config.zero.stage = 3;
    config.zero.param_persistence_threshold = 0;
    config.zero.sub_group_size = 40;
    config.ebb.split_master = GetParam().split;
    config.ebb.timeout_seconds = 60;
    if (GetParam().early) {
      config.gradient_clipping = 0;
      config.ebb.check_overflow = false;
    }
    config.zero.offload_param.nvme_paths =
        config.zero.offload_optimizer.nvme_paths = {scratch_.path()};
    config.zero.offload_param.device = config.zero.offload_optimizer.device = GetParam().tier;
    if (GetParam().tier == Tier::kNvme) config.zero.offload_param.max_in_cpu = 0;

    Trained trained;
    OnThreads(kRanks, [&](World world) {
      ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
      ToyModel model({}, device);
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, device, model.spec(), config));
      State read;
      std::shared_future<absl::Status> over;
      for (int step = 0; step < kSteps; ++step) {
        ASSERT_OK(model.Train(engine, world.rank(), step));
        if (step + 1 != kReadAfter) continue;
        if (beside) {
          ASSERT_OK_AND_ASSIGN(
              over, engine.ReadAsync({.take =
                                          [&](StateClass what, std::string_view state,
                                              const Slice& slice, std::span<const float> values) {
                                            Add(read, what, state, slice, values);
                                            return absl::OkStatus();
                                          },
                                      .close = nullptr,
                                      .commit = nullptr,
                                      .may_begin_in_step = true}));
          continue;
        }
        for (const auto& [what, state] :
             {std::pair(StateClass::kMaster, ""), std::pair(StateClass::kOptimizer, "exp_avg"),
              std::pair(StateClass::kOptimizer, "exp_avg_sq")}) {
          ASSERT_OK(engine.Read(
              what,
              [&](const Slice& slice, std::span<const float> values) {
                Add(read, what, state, slice, values);
                return absl::OkStatus();
              },
              state));
        }
      }
      if (over.valid()) ASSERT_OK(over.get());
      ASSERT_OK_AND_ASSIGN(std::vector<uint32_t> masters, MasterBits(engine, model.spec()));
      if (world.rank() == 0) trained = {std::move(read), std::move(masters)};
    });
    return trained;
  }

  Scratch scratch_;
};
INSTANTIATE_TEST_SUITE_P(Tiers, EngineAsyncReadsTest,
                         ::testing::Values(Cell{Tier::kDevice}, Cell{Tier::kDevice, true},
                                           Cell{Tier::kDevice, false, true}, Cell{Tier::kCpu},
                                           Cell{Tier::kCpu, true}, Cell{Tier::kNvme},
                                           Cell{Tier::kNvme, true}, Cell{Tier::kNvme, false, true}),
                         ::testing::PrintToStringParamName());

TEST_P(EngineAsyncReadsTest, GiveTheLastStepAndChangeNoBitOfTheNextOnes) {
  const Trained now = Train(/*beside=*/false), beside = Train(/*beside=*/true);
  EXPECT_FALSE(now.read.empty());
  EXPECT_TRUE(beside.read == now.read);
  EXPECT_EQ(beside.masters, now.masters);
}

}  // namespace
}  // namespace ebb::testing::engine_async_reads_test
