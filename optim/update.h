// The optimizer step over one contiguous run of a shard: one pass over memory that reads the
// gradient, updates the fp32 master and the states, and writes the parameter in the compute dtype.
//
// Arithmetic is fp32 with explicit fused multiply-adds and IEEE division and square root, so every
// SIMD width, thread count and device gives the same bits (NaN payloads may differ). Per element,
// on gradient_factor * gradient; update_element.inc is the definition:
//
//   Adam, AdamW  Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2:
//                two states, momentum and variance
//   SGD          torch.optim.SGD's rule for momentum, dampening, nesterov and weight decay:
//                one state where momentum is not 0
//   Lion         Chen et al. 2023, algorithm 2: one state, momentum
//   Adagrad      torch.optim.Adagrad's rule: one state, the sum of squares
//   RMSprop      torch.optim.RMSprop's rule: the average of squares; one more state if momentum is
//                not 0, and one more if it is centered
//   LAMB         You et al. 2020, algorithm 2: Adam's two states. After Adam's moments, each
//                parameter w by itself:
//                  u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * w
//                  w = w - learning_rate * ratio * u
//   LARS         You et al. 2017, algorithm 1, each parameter by itself; one state if momentum is
//                not 0:
//                  b = momentum * b + ratio * (g + weight_decay * w)
//                  w = w - learning_rate * b
//
// The ratio in the last two is TrustRatio() of norms over all of w (parameter_norms.h).
//
// Bytes per element: 4 for the master and those of each state (fp32: 4), read and written; gradient read;
// the parameter written. A split master (split_master.h) saves 2: parameter and low half are read
// and written, 2 each. A parameter that is the master (stochastic_rounding.h) saves 6: it alone is
// read and written.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "ebb/optim/checksum.h"
#include "ebb/optim/update_arrays.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

// Names of the fp32 states that an optimizer keeps for each element, in order, as in torch:
// {"exp_avg", "exp_avg_sq"} for Adam, {} for SGD without momentum.
std::span<const std::string_view> StateNames(const OptimizerConfig& optimizer);

// Whether the state with this name never holds a negative number: an average or a sum of squares.
bool IsNeverNegative(std::string_view state);

// The scalars that change from step to step.
struct UpdateScalars {
  // The number of the applied update, from 1: for bias correction; SGD's first update copies the
  // gradient.
  int64_t step = 1;
  double learning_rate = 0;
  // Adam's betas, if a schedule cycles them; negative: the config's.
  double beta1 = -1, beta2 = -1;
  float gradient_factor = 1;  // unscaling and clipping together
  double trust_ratio = 1;     // for LAMB and LARS: of the updated parameter
};

void Update(ThreadTeam& team, const OptimizerConfig& optimizer, const UpdateArrays& arrays,
            const UpdateScalars& scalars);

// Checksums (checksum.h) of the master, or of a split one's low half, and of each state, as the
// update has read and as it has written them. 0 for an array that the master form does not have.
struct UpdateChecksums {
  uint64_t read[1 + kStatesMax] = {}, written[1 + kStatesMax] = {};
};
// An update with the checksums in the same pass, from registers. `scratch`: of
// UpdateChecksumScratch(arrays.count).
constexpr int64_t UpdateChecksumScratch(int64_t count) {
  return 2 * (1 + kStatesMax) * ChecksumBlocks(count * int64_t{sizeof(float)});
}
UpdateChecksums UpdateAndSum(ThreadTeam& team, const OptimizerConfig& optimizer,
                             const UpdateArrays& arrays, const UpdateScalars& scalars,
                             std::span<uint64_t> scratch);

}  // namespace ebb::optim
