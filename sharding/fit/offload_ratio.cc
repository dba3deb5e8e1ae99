#include "ebb/sharding/fit/offload_ratio.h"

#include <algorithm>
#include <cmath>

#include "ebb/sharding/fit/budget.h"

namespace ebb::sharding {
namespace {

constexpr int kHundredths = 100;

// The table of the same step with other ratios. If none can be laid out, the plan reports the error.
class Trial {
 public:
  explicit Trial(const PlanInputs& inputs) : config_(*inputs.config), inputs_(inputs) {
    inputs_.config = &config_;
  }

  bool HostHolds(int hundredths) {
    const absl::StatusOr<Table> table = With(hundredths);
    return !table.ok() || HostBytes(table->bytes) <= config_.ebb.host_memory.value_or(INT64_MAX);
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
  absl::StatusOr<Table> With(int hundredths) {
    config_.zero.offload_optimizer.ratio = static_cast<double>(hundredths) / kHundredths;
    return PlanTable(inputs_);
  }
  bool IsTooLarge(int hundredths, int64_t device_bytes) {
    const absl::StatusOr<Table> table = With(hundredths);
    return table.ok() && DeviceBytes(table->bytes) > device_bytes;
  }

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
  if (inputs.config->ebb.host_memory && !trial.HostHolds(chosen))
    chosen = trial.RaisedFrom(0, device_bytes);
  return static_cast<double>(chosen) / kHundredths;
}

}  // namespace ebb::sharding
