#include "ebb/runtime/engine/outcome/step_scalars.h"

#include <cstddef>
#include <span>

#include "ebb/optim/update_constants.h"

namespace ebb {

optim::UpdateScalars StepConstants::ScalarsOf(const UpdateTable::Set& set,
                                              const StepScalars& scalars) const {
  const double scheduled = scalars.rate_of_step
                               ? scalars.rates.learning_rate
                               : optim::RatesAt(config_.scheduler, set.optimizer.learning_rate,
                                                /*applied=*/scalars.step - 1)
                                     .learning_rate;
  return {.step = scalars.step,
          .learning_rate =
              rates_.learning_rate(scalars.parity, set.group).value_or(scheduled * set.lr_factor),
          .beta1 = scalars.rates.beta1,
          .beta2 = scalars.rates.beta2,
          .gradient_factor = scalars.gradient_factor};
}

OptimizerConfig StepConstants::OptimizerOf(const UpdateTable::Set& set,
                                           const StepScalars& scalars) const {
  OptimizerConfig optimizer = set.optimizer;
  optimizer.weight_decay =
      rates_.weight_decay(scalars.parity, set.group).value_or(optimizer.weight_decay);
  return optimizer;
}

double StepConstants::LearningRateOf(const ParameterGroupConfig* group,
                                     const StepScalars& scalars) const {
  const double lr_factor = group == nullptr ? 1 : group->lr_factor;
  return rates_.learning_rate(scalars.parity, group)
      .value_or(scalars.rates.learning_rate * lr_factor);
}

void StepConstants::Set(int parity, bool early, const StepScalars& scalars) {
  StepScalars& kept = scalars_[parity][early ? 1 : 0];
  kept = scalars;
  kept.parity = parity;
  const std::span<optim::UpdateConstants> constants = control_.constants(parity, early);
  for (size_t i = 0; i < constants.size(); ++i) {
    const UpdateTable::Set& set = table_.sets()[i];
    constants[i] = kept.apply
                       ? optim::UpdateConstantsOf(OptimizerOf(set, kept), ScalarsOf(set, kept))
                       : optim::UpdateConstants();
  }
}

}  // namespace ebb
