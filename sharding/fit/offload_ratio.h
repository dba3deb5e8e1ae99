// How much of masters and optimizer states goes below the device, where the config leaves it open:
// "auto" of zero_optimization.offload_optimizer.ratio.
//
//   device  | kernels of the trainer | (1 - ratio) n |
//   host    | ratio n               .................|     both parts of an update begin together,
//                                                          and should end together
//
// Both begin when the norm is known (late updates) and run under the next forward, or as gradients
// become final (early updates) and run under backward. For a sub-group below the device the
// gradient comes down, the processor updates, and the new parameter goes up. The three overlap with
// those of other sub-groups. So n elements take n / h seconds with h = min(host, copies). On the
// device they take n / device, beside F seconds of the trainer's kernels. The two end together at
//
//   ratio = h / (h + device) * (1 + F * device / n),   at most 1
//
// F is the trainer's, and is not known when an engine is made. F is taken as 0, which gives the
// least of these ratios. The choice loses at most the updates that stay on the device, (1 - ratio)
// n / device; an engine that offloads nothing has all of these. A ratio for an F that is too large
// would make the step wait for the processor.
//
// The model leaves out work that the engine hides or cannot know: the gradients of a unit that is
// partly below the device come down whole, and the device's part goes up again; sums of several
// rounds on the host; and the disk, if states are on NVMe.
#pragma once

#include <cstdint>
#include <optional>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// Rates of one rank, in elements a second.
struct UpdateRates {
  double device = 0;  // updated on the device
  double host = 0;    // updated by the processor, in host memory
  double copies = 0;  // of an update's gradients down, beside copies of fresh parameters up
};

// The ratio above, with F = 0. Rates are positive.
double BalancedRatio(const UpdateRates& rates);

// The share in hundredths: `balanced`, or more until the predicted pools on the device take at most
// `device_bytes` (not given: no bound). One hundredth less would not fit. Sub-groups are whole, so
// with few of them a yet lower ratio may fit again; it is not looked for. If ebb.host_memory cannot
// hold that share, the result is the share that the device alone asks for, or 1 if no share is
// enough. A plan with that share then reports the missing memory. Also 1 where all states stay on
// the device, as the ratio has no meaning there.
double ChooseRatio(const PlanInputs& inputs, double balanced, std::optional<int64_t> device_bytes);

}  // namespace ebb::sharding
