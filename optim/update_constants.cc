#include "ebb/optim/update_constants.h"

#include <cassert>
#include <cmath>

#include "ebb/optim/update.h"

namespace ebb::optim {

UpdateRule UpdateRuleOf(const OptimizerConfig& optimizer) {
  const bool momentum = optimizer.momentum != 0;
  switch (optimizer.type) {
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW:
      break;
    case OptimizerType::kSgd:
      return momentum ? UpdateRule::kSgdWithMomentum : UpdateRule::kSgd;
    case OptimizerType::kLion:
      return UpdateRule::kLion;
    case OptimizerType::kAdagrad:
      return UpdateRule::kAdagrad;
    case OptimizerType::kRmsprop:
      if (optimizer.centered)
        return momentum ? UpdateRule::kCenteredRmspropWithMomentum : UpdateRule::kCenteredRmsprop;
      return momentum ? UpdateRule::kRmspropWithMomentum : UpdateRule::kRmsprop;
    case OptimizerType::kLamb:
      return UpdateRule::kLamb;
    case OptimizerType::kLars:
      return momentum ? UpdateRule::kLarsWithMomentum : UpdateRule::kLars;
    case OptimizerType::kMuon:
      return UpdateRule::kMuon;
  }
  return UpdateRule::kAdam;
}

AdamConstants AdamConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars) {
  assert(scalars.step >= 1);
  const double beta1 = scalars.beta1 < 0 ? optimizer.beta1 : scalars.beta1;
  const double beta2 = scalars.beta2 < 0 ? optimizer.beta2 : scalars.beta2;
  const double rate = scalars.learning_rate;
  // AdamW is decoupled by its name; Adam by adam_w_mode.
  const bool decoupled =
      optimizer.type == OptimizerType::kAdamW || optimizer.decoupled_weight_decay;
  double step_size = rate, root_correction = 1;
  if (optimizer.bias_correction) {
    const double step = static_cast<double>(scalars.step);
    step_size = rate / (1 - std::pow(beta1, step));
    root_correction = 1 / std::sqrt(1 - std::pow(beta2, step));
  }
  return {.gradient_factor = scalars.gradient_factor,
          .l2 = decoupled ? 0.0f : static_cast<float>(optimizer.weight_decay),
          .decay = decoupled ? static_cast<float>(1 - rate * optimizer.weight_decay) : 1.0f,
          .momentum_weight = AverageWeight(beta1),
          .beta2 = static_cast<float>(beta2),
          .one_minus_beta2 = static_cast<float>(1 - beta2),
          .root_correction = static_cast<float>(root_correction),
          .epsilon = static_cast<float>(optimizer.epsilon),
          .minus_step_size = static_cast<float>(-step_size)};
}

SgdConstants SgdConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars) {
  assert(scalars.step >= 1);
  return {.gradient_factor = scalars.gradient_factor,
          .l2 = static_cast<float>(optimizer.weight_decay),
          .momentum = static_cast<float>(optimizer.momentum),
          .one_minus_dampening = static_cast<float>(1 - optimizer.dampening),
          .minus_learning_rate = static_cast<float>(-scalars.learning_rate),
          .first = scalars.step == 1,
          .nesterov = optimizer.nesterov};
}

LionConstants LionConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars) {
  const double beta1 = scalars.beta1 < 0 ? optimizer.beta1 : scalars.beta1;
  const double beta2 = scalars.beta2 < 0 ? optimizer.beta2 : scalars.beta2;
  const double rate = scalars.learning_rate;
  return {.gradient_factor = scalars.gradient_factor,
          .decay = static_cast<float>(1 - rate * optimizer.weight_decay),
          .direction_weight = AverageWeight(beta1),
          .momentum_weight = AverageWeight(beta2),
          .minus_learning_rate = static_cast<float>(-rate)};
}

AdagradConstants AdagradConstantsOf(const OptimizerConfig& optimizer,
                                    const UpdateScalars& scalars) {
  assert(scalars.step >= 1);
  const double slowed = 1 + static_cast<double>(scalars.step - 1) * optimizer.lr_decay;
  return {.gradient_factor = scalars.gradient_factor,
          .l2 = static_cast<float>(optimizer.weight_decay),
          .epsilon = static_cast<float>(optimizer.epsilon),
          .minus_learning_rate = static_cast<float>(-scalars.learning_rate / slowed)};
}

RmspropConstants RmspropConstantsOf(const OptimizerConfig& optimizer,
                                    const UpdateScalars& scalars) {
  return {.gradient_factor = scalars.gradient_factor,
          .l2 = static_cast<float>(optimizer.weight_decay),
          .alpha = static_cast<float>(optimizer.alpha),
          .one_minus_alpha = 1 - static_cast<float>(optimizer.alpha),
          .epsilon = static_cast<float>(optimizer.epsilon),
          .momentum = static_cast<float>(optimizer.momentum),
          .minus_learning_rate = static_cast<float>(-scalars.learning_rate)};
}

LambConstants LambConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars) {
  assert(scalars.step >= 1);
  const double beta1 = scalars.beta1 < 0 ? optimizer.beta1 : scalars.beta1;
  const double beta2 = scalars.beta2 < 0 ? optimizer.beta2 : scalars.beta2;
  double of_momentum = 1, of_variance = 1;
  if (optimizer.bias_correction) {
    const double step = static_cast<double>(scalars.step);
    of_momentum = 1 / (1 - std::pow(beta1, step));
    of_variance = 1 / (1 - std::pow(beta2, step));
  }
  return {.gradient_factor = scalars.gradient_factor,
          .weight_decay = static_cast<float>(optimizer.weight_decay),
          .momentum_weight = AverageWeight(beta1),
          .beta2 = static_cast<float>(beta2),
          .one_minus_beta2 = static_cast<float>(1 - beta2),
          .momentum_correction = static_cast<float>(of_momentum),
          .variance_correction = static_cast<float>(of_variance),
          .root_correction = static_cast<float>(std::sqrt(of_variance)),
          .epsilon = static_cast<float>(optimizer.epsilon),
          .epsilon_inside_root = optimizer.epsilon_inside_root,
          .minus_step_size = static_cast<float>(-scalars.learning_rate * scalars.trust_ratio)};
}

LarsConstants LarsConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars) {
  assert(scalars.step >= 1);
  return {.gradient_factor = scalars.gradient_factor,
          .l2 = static_cast<float>(optimizer.weight_decay),
          .trust_ratio = static_cast<float>(scalars.trust_ratio),
          .momentum = static_cast<float>(optimizer.momentum),
          .one_minus_dampening = static_cast<float>(1 - optimizer.dampening),
          .minus_learning_rate = static_cast<float>(-scalars.learning_rate),
          .first = scalars.step == 1,
          .nesterov = optimizer.nesterov};
}

MuonConstants MuonConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars) {
  return {.gradient_factor = scalars.gradient_factor,
          .momentum = static_cast<float>(optimizer.momentum),
          .one_minus_momentum = static_cast<float>(1 - optimizer.momentum),
          .decay = static_cast<float>(1 - scalars.learning_rate * optimizer.weight_decay),
          .minus_learning_rate = static_cast<float>(-scalars.learning_rate),
          .nesterov = optimizer.nesterov};
}

UpdateConstants UpdateConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars) {
  UpdateConstants constants = {};
  constants.step = scalars.step;
  constants.apply = true;
  switch (optimizer.type) {
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW:
      constants.adam = AdamConstantsOf(optimizer, scalars);
      break;
    case OptimizerType::kSgd:
      constants.sgd = SgdConstantsOf(optimizer, scalars);
      break;
    case OptimizerType::kLion:
      constants.lion = LionConstantsOf(optimizer, scalars);
      break;
    case OptimizerType::kAdagrad:
      constants.adagrad = AdagradConstantsOf(optimizer, scalars);
      break;
    case OptimizerType::kRmsprop:
      constants.rmsprop = RmspropConstantsOf(optimizer, scalars);
      break;
    case OptimizerType::kLamb:
      constants.lamb = LambConstantsOf(optimizer, scalars);
      break;
    case OptimizerType::kLars:
      constants.lars = LarsConstantsOf(optimizer, scalars);
      break;
    case OptimizerType::kMuon:
      constants.muon = MuonConstantsOf(optimizer, scalars);
      break;
  }
  return constants;
}

}  // namespace ebb::optim
