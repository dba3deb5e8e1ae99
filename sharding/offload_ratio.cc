#include "ebb/sharding/offload_ratio.h"

#include <algorithm>
#include <cmath>

#include "ebb/sharding/memory_model.h"

namespace ebb::sharding {
namespace {

constexpr int kHundredths = 100;

// Plans of the same step with other ratios. Without a cap, so that what is refused is not the device.
class Trial {
 public:
  explicit Trial(const PlanInputs& inputs) : config_(*inputs.config), inputs_(inputs) {
    config_.ebb.device_memory.reset();
    inputs_.config = &config_;
  }

  absl::StatusOr<Plan> With(int hundredths) {
    config_.zero.offload_optimizer.ratio = static_cast<double>(hundredths) / kHundredths;
    return PlanStep(inputs_);
  }
  bool IsTooLarge(int hundredths, int64_t device_bytes) {
    const absl::StatusOr<Plan> plan = With(hundredths);
    if (!plan.ok()) return false;
    uint64_t needed = 0;
    for (const MemoryRow& row : PredictMemory(*plan)) {
      if (row.tier == Tier::kDevice) needed += row.predicted_bytes;
    }
    return needed > static_cast<uint64_t>(std::max<int64_t>(0, device_bytes));
  }
  int RaisedFrom(int hundredths, std::optional<int64_t> device_bytes) {
    if (!device_bytes || !IsTooLarge(hundredths, *device_bytes)) return hundredths;
    int too_large = hundredths, fits = kHundredths;
    while (fits - too_large > 1) {
      const int middle = (too_large + fits) / 2;
      (IsTooLarge(middle, *device_bytes) ? too_large : fits) = middle;
    }
    return fits;
  }

 private:
  Config config_;
  PlanInputs inputs_;
};

}  // namespace

double BalancedRatio(const UpdateRates& rates) {
  const double host = std::min(rates.host, rates.copies);
  return host / (host + rates.device);
}

double ChooseRatio(const PlanInputs& inputs, double balanced, std::optional<int64_t> device_bytes) {
  if (inputs.config->optimizer_tier() == Tier::kDevice) return 1;
  Trial trial(inputs);
  int chosen =
      trial.RaisedFrom(static_cast<int>(std::lround(balanced * kHundredths)), device_bytes);
  if (inputs.config->ebb.host_memory && !trial.With(chosen).ok())
    chosen = trial.RaisedFrom(0, device_bytes);
  return static_cast<double>(chosen) / kHundredths;
}

}  // namespace ebb::sharding
