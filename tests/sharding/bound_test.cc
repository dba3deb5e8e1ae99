#include "ebb/sharding/report/bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ebb/sharding/report/machine_costs.h"
#include "ebb/sharding/report/simulate.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::bound_test {
namespace {

using enum Resource;

constexpr double kForward = 20'000, kBackward = 50'000;

// States in RAM on one rank. Rates are 1, but cores are plenty, so that an update takes its bytes.
class BoundTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config_.micro_batch_size = 1;
    config_.gradient_accumulation_steps = 1;
    config_.compute = DType::kBFloat16;
    config_.accumulation = DType::kFloat32;
    config_.gradient_clipping = 1;
    config_.zero.stage = 1;
    config_.zero.offload_optimizer.device = Tier::kCpu;
    config_.ebb.coalesce_bytes = 0;
    machine_.core_bytes = 1e9;
    for (int r = 0; r < kResources; ++r) machine_.rates[static_cast<Resource>(r)] = 1;
    machine_.rates[kDeviceMemory] = 1e9;
  }
  void UpdateEarly() {
    config_.gradient_clipping = 0;
    config_.ebb.check_overflow = false;
    config_.bf16_check_grad_overflow = false;
  }
  Plan MakePlan() {
    absl::StatusOr<Plan> plan =
        PlanStep({.model = &model_, .config = &config_, .optimizer_states = 2});
    EXPECT_OK(plan);
    return *std::move(plan);
  }
  StepBound Bound(const Plan& plan) {
    const std::vector<KernelWork> work(sizes_.size(), {.forward = kForward, .backward = kBackward});
    absl::StatusOr<MachineCosts> costs = MachineCosts::Make(plan, machine_, work, false);
    EXPECT_OK(costs);
    return BoundOf(plan, ListOf(plan, plan.carries_updates), *costs);
  }
  // Seconds of units [0, count) at so many bytes an element.
  double Of(size_t count, double bytes) const {
    double seconds = 0;
    for (size_t unit = 0; unit < count; ++unit)
      seconds += static_cast<double>(sizes_[unit]) * bytes;
    return seconds;
  }
  size_t units() const { return sizes_.size(); }

  const std::vector<int64_t> sizes_ = {4096, 1024, 8192, 2048};
  const ModelSpec model_ = UnitChain(sizes_);
  Config config_;
  Machine machine_;
};

// Bytes of an element: the bf16 gradient; master, and two states, read and written; the bf16 parameter,
// written and then read by the upload.
constexpr double kUpdated = 2 + 3 * 8 + 2 + 2, kDownloaded = 2, kNormTaken = 2 + 8.0 / 1024;

TEST_F(BoundTest, NoUpdateComesBeforeTheNormOfTheWholeStep) {
  const StepBound bound = Bound(MakePlan());
  double order = 0;
  for (size_t unit = 0; unit < units(); ++unit) {
    const double rest = static_cast<double>(units() - unit) * kForward;
    order = std::max(order, Of(unit + 1, kUpdated) + rest);
  }
  // The last gradient comes when kernels are over: that of the first unit.
  order += static_cast<double>(units()) * kBackward + Of(1, kDownloaded + kNormTaken);
  EXPECT_TRUE(bound.awaits_verdict);
  EXPECT_DOUBLE_EQ(bound.order, order);
  EXPECT_EQ(bound.order_word(), "host memory");
  EXPECT_EQ(bound.line(), "order");
  EXPECT_EQ(bound.seconds(), order);
  EXPECT_DOUBLE_EQ(bound.resources[static_cast<size_t>(kDevice)],
                   static_cast<double>(units()) * (kForward + kBackward));
  EXPECT_DOUBLE_EQ(bound.resources[static_cast<size_t>(kToHost)], Of(units(), kDownloaded));
  EXPECT_DOUBLE_EQ(bound.resources[static_cast<size_t>(kToDevice)], Of(units(), 2));
  EXPECT_DOUBLE_EQ(bound.host_update, Of(units(), kUpdated - 2)) << "the upload is not of it";
}

// All units up to one are updated between the one's backward and its forward.
TEST_F(BoundTest, AnEarlyUpdateComesBetweenItsBackwardAndItsForward) {
  UpdateEarly();
  const StepBound bound = Bound(MakePlan());
  double order = 0;
  for (size_t unit = 0; unit < units(); ++unit) {
    const double rest = static_cast<double>(units() - unit) * (kForward + kBackward);
    order = std::max(order, Of(unit + 1, kUpdated + kDownloaded + kNormTaken) + rest);
  }
  EXPECT_FALSE(bound.awaits_verdict);
  EXPECT_DOUBLE_EQ(bound.order, order);
}

// With parameters in RAM, gathers for the backward behind a gradient take RAM too, except for what the
// device may have gathered before. The last unit stays gathered for its backward.
TEST_F(BoundTest, GathersForOtherKernelsComeBesideTheUpdates) {
  UpdateEarly();
  config_.zero.stage = 3;
  config_.zero.offload_param.device = Tier::kCpu;
  config_.zero.param_persistence_threshold = 0;
  config_.ebb.prefetch_depth = 0;
  const Plan plan = MakePlan();
  const auto held = static_cast<double>(plan.table.bytes.Of(Tier::kDevice, StateClass::kGather));
  double order = 0, without = 0;
  for (size_t after = 0; after < units(); ++after) {  // its gradient is final
    for (size_t before = 0; before < units(); ++before) {
      const double rest = static_cast<double>(units() - before) * kForward +
                          static_cast<double>(units() - after) * kBackward +
                          Of(std::min(after, before) + 1, kUpdated + kDownloaded + kNormTaken);
      without = std::max(without, rest);
      order = std::max(order, rest + std::max(0.0, Of(after, 2) - held));
    }
  }
  EXPECT_GT(order, without);
  EXPECT_DOUBLE_EQ(Bound(plan).order, order);
}

// In several rounds only the last backward and the first forward are beside updates.
TEST_F(BoundTest, RoundsBetweenHideNoUpdate) {
  UpdateEarly();
  const double one = Bound(MakePlan()).order;
  config_.gradient_accumulation_steps = 6;
  const StepBound bound = Bound(MakePlan());
  const double kernels = 6 * static_cast<double>(units()) * (kForward + kBackward);
  EXPECT_DOUBLE_EQ(bound.resources[static_cast<size_t>(kDevice)], kernels);
  EXPECT_GE(bound.order, one + kernels * 5 / 6);
}

// A disk works before the verdict too, as far as slots have room.
TEST_F(BoundTest, SlotsHideReadsBeforeTheVerdictAndWritesBehindIt) {
  config_.zero.offload_optimizer = {.device = Tier::kNvme, .nvme_paths = {"/disk"}};
  const Plan plan = MakePlan();
  double slots = 0;
  for (const Array& row : plan.table.rows) {
    if (row.purpose == Purpose::kWorkMaster)
      slots += static_cast<double>(row.turns * row.turn_bytes);
  }
  ASSERT_GT(slots, 0);
  machine_.rates[kHostMemory] = 1e9;
  const double all =
      Of(units(), 3 * 4 * 2) - 2 * slots + static_cast<double>(units()) * kBackward + kForward;
  const StepBound bound = Bound(plan);
  EXPECT_GE(bound.order, all);
  EXPECT_EQ(bound.order_word(), "disk");
}

class SlowThings : public Costs {
 public:
  explicit SlowThings(Random& random) {
    for (int r = 0; r < kResources; ++r)
      rates_[static_cast<Resource>(r)] = static_cast<double>(random.Between(1000, 100'000));
    rates_[kDevice] = rates_[kCores] = 1;
  }
  Cost Of(const Op& op) const override {
    Cost cost;
    const auto bytes = static_cast<double>(op.bytes);
    switch (op.code()) {
      case Code::kKernels:
        if (op.scope >= 0) cost.amounts[kDevice] = 0.1;
        break;
      case Code::kCopy:
        cost.amounts[op.stream == StreamId::kUpload ? kToDevice : kToHost] = bytes;
        break;
      case Code::kTransfer:
        cost.amounts[op.reads_file() ? kDiskRead : kDiskWrite] = bytes;
        cost.amounts[kDisk] = bytes;
        break;
      case Code::kUpdate:
        cost.amounts[kHostMemory] = bytes;
        break;
      default:
        break;
    }
    return cost;
  }
  Amounts rates() const override { return rates_; }
  bool caller_computes() const override { return false; }
  bool caller_awaits_report() const override { return false; }

 private:
  Amounts rates_;
};

// Simulated steps overlap their neighbours, so the mean of many is compared.
TEST(Bound, NoSimulatedStepIsFaster) {
  constexpr int kSteps = 24;
  constexpr double kOverlap = 1.02;
  int reached = 0;
  for (int number = 1; number <= Cases(120); ++number) {
    const RandomCase random_case(static_cast<uint64_t>(number), /*offloads=*/number % 4 != 0);
    SCOPED_TRACE(random_case.description());
    ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random_case.inputs()));
    Random random(random_case.seed);
    const SlowThings costs(random);
    ASSERT_OK_AND_ASSIGN(const Simulated simulated, Simulate(plan, costs, kSteps));
    const StepBound bound = BoundOf(plan, ListOf(plan, plan.carries_updates), costs);
    EXPECT_LE(bound.seconds(), simulated.seconds_per_step * kOverlap) << bound.line();
    reached += bound.seconds() > 0.95 * simulated.seconds_per_step ? 1 : 0;
  }
  EXPECT_GT(reached, 0);
}

}  // namespace
}  // namespace ebb::sharding::bound_test
