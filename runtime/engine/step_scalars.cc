#include "ebb/runtime/engine/step_scalars.h"

#include <cstddef>
#include <span>

#include "ebb/optim/update_constants.h"

namespace ebb {

optim::UpdateScalars StepConstants::ScalarsOf(const UpdateTable::Set& set,
                                              const StepScalars& scalars) const {
  const double rate = scalars.rate_of_step
                          ? scalars.rates.learning_rate
                          : optim::RatesAt(config_.scheduler, set.optimizer.learning_rate,
                                           /*applied=*/scalars.step - 1)
                                .learning_rate;
  return {.step = scalars.step,
          .learning_rate = rate * set.lr_factor,
          .beta1 = scalars.rates.beta1,
          .beta2 = scalars.rates.beta2,
          .gradient_factor = scalars.gradient_factor};
}

void StepConstants::Set(int parity, bool early, const StepScalars& scalars) {
  scalars_[parity][early ? 1 : 0] = scalars;
  const std::span<optim::UpdateConstants> constants = control_.constants(parity, early);
  for (size_t i = 0; i < constants.size(); ++i) {
    const UpdateTable::Set& set = table_.sets()[i];
    constants[i] = scalars.apply ? optim::UpdateConstantsOf(set.optimizer, ScalarsOf(set, scalars))
                                 : optim::UpdateConstants();
  }
}

}  // namespace ebb
