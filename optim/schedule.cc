#include "ebb/optim/schedule.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numbers>

namespace ebb::optim {
namespace {

// DeepSpeed's schedulers count from -1, before their first step, and step once after each applied
// update. So the update after `applied` updates sees iteration applied - 1.

// The share of the warm-up at `iteration` in [0, steps). It is 0 at iteration 0, so the first two
// updates of a warm-up have its minimum.
double WarmupShare(const SchedulerConfig& scheduler, int64_t iteration, int64_t steps) {
  const double n = static_cast<double>(steps), i = static_cast<double>(iteration);
  return scheduler.warmup_log ? 1 / std::log(n) * std::log(i + 1) : i / n;
}

double Warmup(const SchedulerConfig& scheduler, double base, int64_t iteration) {
  const bool decays = scheduler.type == SchedulerType::kWarmupDecay;
  const double minimum = scheduler.warmup_min_lr;
  const double maximum = scheduler.warmup_max_lr.value_or(decays ? 0.001 : base);
  const int64_t steps = std::max<int64_t>(2, scheduler.warmup_num_steps);
  if (iteration < 0) return minimum;
  double share = 1;
  if (iteration < steps) {
    share = WarmupShare(scheduler, iteration, steps);
  } else if (decays) {
    const double left = static_cast<double>(scheduler.total_num_steps - iteration);
    const double whole = static_cast<double>(scheduler.total_num_steps - steps);
    share = std::max(0.0, left / std::max(1.0, whole));
  }
  return minimum + (maximum - minimum) * share;
}

// The first update's rate is exactly 0, whatever warmup_min_ratio is. The ratio counts from the
// second update on.
double WarmupCosine(const SchedulerConfig& scheduler, double base, int64_t iteration) {
  const int64_t steps = std::max<int64_t>(2, scheduler.warmup_num_steps);
  if (iteration < 0) return 0;
  if (iteration < steps) {
    const double minimum = scheduler.warmup_min_ratio;
    return base * (minimum + WarmupShare(scheduler, iteration, steps) * (1 - minimum));
  }
  const int64_t whole = std::max<int64_t>(1, scheduler.total_num_steps - steps);
  const double progress =
      std::min(1.0, static_cast<double>(iteration - steps + 1) / static_cast<double>(whole));
  const double cosine = (1 + std::cos(std::numbers::pi * progress)) / 2;
  const double minimum = scheduler.cos_min_ratio;
  return base * std::max(0.0, minimum + (1 - minimum) * cosine);
}

// The height on the triangle at the update after `applied` updates: 0 at both feet, 1 at the peak.
double CycleHeight(const SchedulerConfig& scheduler, double first, double second, double applied) {
  const double whole = first + second, peak = first / whole;
  const double cycle = 1 + applied / whole;
  const double x = cycle - std::floor(cycle);
  const bool rising = x <= peak;
  const int64_t stairs =
      rising ? scheduler.cycle_first_stair_count
             : scheduler.cycle_second_stair_count.value_or(scheduler.cycle_first_stair_count);
  if (stairs <= 0) return rising ? x / peak : (x - 1) / (peak - 1);
  // Computed from whole steps, because x can lie just below a stair.
  const double count = static_cast<double>(stairs), step = std::fmod(applied, whole);
  const double position = step <= first ? step * count / first : (whole - step) * count / second;
  return std::floor(position) / count;
}

ScheduledRates OneCycle(const SchedulerConfig& scheduler, int64_t applied) {
  const double first = static_cast<double>(scheduler.cycle_first_step_size);
  const double second = static_cast<double>(
      scheduler.cycle_second_step_size.value_or(scheduler.cycle_first_step_size));
  const double low = scheduler.cycle_min_lr, high = scheduler.cycle_max_lr;
  const double low_momentum = scheduler.cycle_min_mom, high_momentum = scheduler.cycle_max_mom;
  const double iteration = static_cast<double>(applied - 1);
  double rate = low, momentum = high_momentum;
  if (applied == 0) {
    momentum = low_momentum;  // initially; from the next update on it falls from the maximum
  } else if (iteration < first + second) {
    const double height = CycleHeight(scheduler, first, second, iteration + 1);
    rate = low + (high - low) * height;
    momentum = high_momentum - (high_momentum - low_momentum) * height;
  } else if (scheduler.decay_step_size != 0) {
    const double decays =
        (iteration - (first + second) + 1) / static_cast<double>(scheduler.decay_step_size);
    rate = low / (1 + scheduler.decay_lr_rate * decays);
    momentum = high_momentum * (1 + scheduler.decay_mom_rate * decays);
  }
  if (!scheduler.cycle_momentum) return {.learning_rate = rate};
  return {.learning_rate = rate, .beta1 = momentum, .beta2 = 0.99};
}

double LrRangeTest(const SchedulerConfig& scheduler, int64_t applied) {
  double intervals =
      static_cast<double>(applied) / static_cast<double>(scheduler.lr_range_test_step_size);
  if (scheduler.lr_range_test_staircase) intervals = std::floor(intervals);
  return scheduler.lr_range_test_min_lr * (1 + scheduler.lr_range_test_step_rate * intervals);
}

}  // namespace

ScheduledRates RatesAt(const SchedulerConfig& scheduler, double base, int64_t applied) {
  assert(applied >= 0);
  switch (scheduler.type) {
    case SchedulerType::kNone:
      break;
    case SchedulerType::kWarmup:
    case SchedulerType::kWarmupDecay:
      return {.learning_rate = Warmup(scheduler, base, applied - 1)};
    case SchedulerType::kWarmupCosine:
      return {.learning_rate = WarmupCosine(scheduler, base, applied - 1)};
    case SchedulerType::kOneCycle:
      return OneCycle(scheduler, applied);
    case SchedulerType::kLrRangeTest:
      return {.learning_rate = LrRangeTest(scheduler, applied)};
  }
  return {.learning_rate = base};
}

}  // namespace ebb::optim
