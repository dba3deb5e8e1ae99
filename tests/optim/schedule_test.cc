#include "ebb/optim/schedule.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace ebb::optim::schedule_test {
namespace {

constexpr double kBase = 0.002;

struct Row {
  int64_t applied;
  double learning_rate;
  double beta1 = -1;
};

struct Case {
  std::string name;
  SchedulerConfig scheduler;
  std::vector<Row> rows;
  friend std::ostream& operator<<(std::ostream& out, const Case& test) { return out << test.name; }
};

class ScheduleTest : public testing::TestWithParam<Case> {};

TEST_P(ScheduleTest, FollowsDeepSpeed) {
  for (const Row& row : GetParam().rows) {
    const ScheduledRates rates = RatesAt(GetParam().scheduler, kBase, row.applied);
    EXPECT_DOUBLE_EQ(rates.learning_rate, row.learning_rate) << "after " << row.applied;
    EXPECT_DOUBLE_EQ(rates.beta1, row.beta1) << "after " << row.applied;
    EXPECT_EQ(rates.beta2, row.beta1 < 0 ? -1 : 0.99) << "after " << row.applied;
  }
}

// Source of the rows: the classes of DeepSpeed 0.19.6 (commit edaa7221),
// deepspeed/runtime/lr_schedules.py, on a torch.optim.AdamW with lr 0.002, step() called after each
// update; the group's lr and betas before update `applied`.
INSTANTIATE_TEST_SUITE_P(
    Table, ScheduleTest,
    testing::Values(
        Case{"WarmupLogToTheOptimizersRate",
             {.type = SchedulerType::kWarmup, .warmup_min_lr = 0.0001, .warmup_num_steps = 10},
             {{0, 0.0001},
              {1, 0.0001},
              {2, 0.0006719569917615642},
              {5, 0.0014280430082384355},
              {10, 0.0019999999999999996},
              {11, 0.002},
              {50, 0.002}}},
        Case{"WarmupLinear",
             {.type = SchedulerType::kWarmup,
              .warmup_max_lr = 0.01,
              .warmup_num_steps = 8,
              .warmup_log = false},
             {{0, 0}, {1, 0}, {2, 0.00125}, {3, 0.0025}, {8, 0.00875}, {9, 0.01}, {10, 0.01}}},
        Case{"WarmupOfOneStepIsOneOfTwo",
             {.type = SchedulerType::kWarmup, .warmup_num_steps = 1},
             {{0, 0}, {1, 0}, {2, 0.002}, {3, 0.002}}},
        Case{"WarmupDecayLog",
             {.type = SchedulerType::kWarmupDecay, .warmup_num_steps = 5, .total_num_steps = 20},
             {{0, 0},
              {1, 0},
              {2, 0.00043067655807339306},
              {5, 0.001},
              {6, 0.001},
              {7, 0.0009333333333333333},
              {13, 0.0005333333333333334},
              {20, 6.666666666666667e-05},
              {21, 0},
              {40, 0}}},
        Case{"WarmupDecayLinearEndsAtTheMinimum",
             {.type = SchedulerType::kWarmupDecay,
              .warmup_min_lr = 0.001,
              .warmup_max_lr = 0.003,
              .warmup_num_steps = 5,
              .warmup_log = false,
              .total_num_steps = 20},
             {{0, 0.001},
              {1, 0.001},
              {2, 0.0014},
              {5, 0.0026},
              {6, 0.003},
              {7, 0.0028666666666666667},
              {13, 0.0020666666666666667},
              {21, 0.001},
              {22, 0.001}}},
        Case{"WarmupDecayLongerThanTheTotal",
             {.type = SchedulerType::kWarmupDecay,
              .warmup_max_lr = 0.003,
              .warmup_num_steps = 5,
              .total_num_steps = 3},
             {{0, 0}, {5, 0.003}, {6, 0}, {7, 0}}},
        Case{"WarmupCosineLog",
             {.type = SchedulerType::kWarmupCosine, .warmup_num_steps = 5, .total_num_steps = 20},
             {{0, 0},
              {1, 0},
              {2, 0.0008613531161467861},
              {5, 0.002},
              {6, 0.0019781497859737325},
              {7, 0.0019135541030968367},
              {13, 0.0008955819895786735},
              {20, 2.0000000000000002e-07},
              {21, 2.0000000000000002e-07},
              {40, 2.0000000000000002e-07}}},
        Case{"WarmupCosineStartsAtZeroThenAtItsRatio",
             {.type = SchedulerType::kWarmupCosine,
              .warmup_num_steps = 5,
              .warmup_log = false,
              .total_num_steps = 20,
              .warmup_min_ratio = 0.25,
              .cos_min_ratio = 0.1},
             {{0, 0},
              {1, 0.0005},
              {2, 0.0008},
              {3, 0.0011},
              {5, 0.0017000000000000001},
              {6, 0.001980332840660425},
              {13, 0.001005924383059112},
              {19, 0.0002196671593395749},
              {20, 0.0002},
              {21, 0.0002}}},
        Case{
            "WarmupCosineWithoutRoomForTheCosine",
            {.type = SchedulerType::kWarmupCosine, .warmup_num_steps = 5, .total_num_steps = 5},
            {{0, 0}, {1, 0}, {5, 0.002}, {6, 2.0000000000000002e-07}, {7, 2.0000000000000002e-07}}},
        Case{"OneCycle",
             {.type = SchedulerType::kOneCycle,
              .cycle_min_lr = 0.001,
              .cycle_max_lr = 0.01,
              .cycle_first_step_size = 4},
             {{0, 0.001, 0.8},
              {1, 0.0032500000000000003, 0.875},
              {2, 0.0055000000000000005, 0.8500000000000001},
              {3, 0.007750000000000001, 0.8250000000000001},
              {4, 0.010000000000000002, 0.8},
              {5, 0.007750000000000001, 0.8250000000000001},
              {7, 0.0032500000000000003, 0.875},
              {8, 0.001, 0.9},
              {9, 0.001, 0.9},
              {20, 0.001, 0.9}}},
        Case{"OneCycleOfUnequalHalvesWithDecay",
             {.type = SchedulerType::kOneCycle,
              .cycle_min_lr = 0.001,
              .cycle_max_lr = 0.01,
              .decay_lr_rate = 0.5,
              .cycle_first_step_size = 4,
              .cycle_second_step_size = 6,
              .decay_step_size = 2,
              .cycle_min_mom = 0.7,
              .cycle_max_mom = 0.95,
              .decay_mom_rate = 0.01},
             {{0, 0.001, 0.7},
              {1, 0.0032500000000000025, 0.8875},
              {4, 0.009999999999999998, 0.7},
              {5, 0.0085, 0.7416666666666666},
              {6, 0.006999999999999999, 0.7833333333333333},
              {10, 0.001, 0.95},
              {11, 0.0008, 0.9547499999999999},
              {12, 0.0006666666666666666, 0.9594999999999999},
              {13, 0.0005714285714285715, 0.9642499999999998}}},
        Case{"OneCycleInStairsWithoutMomentum",
             {.type = SchedulerType::kOneCycle,
              .cycle_min_lr = 0.001,
              .cycle_max_lr = 0.01,
              .cycle_first_step_size = 6,
              .cycle_second_step_size = 9,
              .cycle_first_stair_count = 3,
              .cycle_momentum = false},
             {{0, 0.001},
              {1, 0.001},
              {2, 0.004},
              {5, 0.007},
              {6, 0.010000000000000002},
              {7, 0.007},
              {9, 0.007},
              {10, 0.004},
              {14, 0.001},
              {15, 0.001},
              {16, 0.001}}},
        Case{"OneCycleWithStairsOnItsWayDownOnly",
             {.type = SchedulerType::kOneCycle,
              .cycle_min_lr = 0.001,
              .cycle_max_lr = 0.01,
              .decay_lr_rate = 0.5,
              .cycle_first_step_size = 6,
              .cycle_second_step_size = 10,
              .cycle_second_stair_count = 2},
             {{1, 0.0025, 0.8833333333333333},
              {5, 0.0085, 0.8166666666666667},
              {6, 0.010000000000000002, 0.8},
              {7, 0.0055000000000000005, 0.8500000000000001},
              {11, 0.0055000000000000005, 0.8500000000000001},
              {12, 0.001, 0.9},
              {17, 0.001, 0.9},
              {30, 0.001, 0.9}}},
        Case{"LrRangeTest",
             {.type = SchedulerType::kLrRangeTest,
              .lr_range_test_step_rate = 0.5,
              .lr_range_test_step_size = 4},
             {{0, 0.001}, {1, 0.0011250000000000001}, {2, 0.00125}, {4, 0.0015}, {9, 0.002125}}},
        Case{"LrRangeTestStaircase",
             {.type = SchedulerType::kLrRangeTest,
              .lr_range_test_min_lr = 0.01,
              .lr_range_test_step_rate = 0.5,
              .lr_range_test_step_size = 4,
              .lr_range_test_staircase = true},
             {{0, 0.01}, {3, 0.01}, {4, 0.015}, {7, 0.015}, {8, 0.02}, {9, 0.02}}},
        Case{"NoneKeepsTheOptimizersRate", {}, {{0, kBase}, {1, kBase}, {1'000'000, kBase}}}),
    [](const testing::TestParamInfo<Case>& test) { return test.param.name; });

}  // namespace
}  // namespace ebb::optim::schedule_test
