// The scalars of one update as its elements see them. Each is computed in double from the
// configuration's doubles and rounded to fp32 once, on the host, so that every kernel of every
// device starts from the same bits.
#pragma once

#include <cstdint>

#include "ebb/optim/update_arrays.h"

namespace ebb {
class ThreadTeam;
struct OptimizerConfig;
}  // namespace ebb

namespace ebb::optim {

struct UpdateScalars;

// Which of update_element.inc's rules, by the states that it keeps.
enum class UpdateRule : uint8_t { kAdam, kSgd, kSgdWithMomentum };
UpdateRule UpdateRuleOf(const OptimizerConfig& optimizer);

struct AdamConstants {
  float gradient_factor;
  float l2;     // weight decay that is added to the gradient; 0: none
  float decay;  // 1 - learning_rate * weight_decay where it is decoupled, else 1
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float root_correction;  // 1 / sqrt(1 - beta2^step), or 1 without bias correction
  float epsilon;
  float minus_step_size;  // -learning_rate / (1 - beta1^step), or -learning_rate
};

struct SgdConstants {
  float gradient_factor;
  float l2;
  float momentum, one_minus_dampening;
  float minus_learning_rate;
  bool first, nesterov;
};

AdamConstants AdamConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);
SgdConstants SgdConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);

// What an update reads when it runs, not when it is enqueued, so that a step's verdict may come in
// between. Trivially copyable, without initializers: it lies in memory that host and device reach.
struct UpdateConstants {
  int64_t step;  // of applied updates: random bits differ from step to step
  bool apply;    // false: the update writes nothing
  AdamConstants adam;
  SgdConstants sgd;
};

// `apply` is true; of the two rules' constants those of the optimizer's rule are set.
UpdateConstants UpdateConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);

// The core of update.h's Update.
void Update(ThreadTeam& team, UpdateRule rule, const UpdateArrays& arrays,
            const UpdateConstants& constants);

}  // namespace ebb::optim
