// The optimizers in tests of updates, one of each kind.
#pragma once

#include <ostream>
#include <string>

#include "ebb/optim/update.h"
#include "ebb/optim/update_constants.h"
#include "numbers.h"

namespace ebb::optim {

struct Rule {
  std::string name;
  OptimizerConfig optimizer;
  UpdateScalars scalars;
  friend std::ostream& operator<<(std::ostream& out, const Rule& rule) { return out << rule.name; }
};

inline const Rule kRules[] = {
    {"AdamW", {.weight_decay = 0.1}, {.step = 3, .learning_rate = 0.01, .gradient_factor = 0.37f}},
    {"AdamWithL2",
     {.type = OptimizerType::kAdam, .weight_decay = 0.1, .decoupled_weight_decay = false},
     {.step = 1, .learning_rate = 0.01}},
    {"AdamWithoutBiasCorrection",
     {.type = OptimizerType::kAdam, .epsilon = 1e-6, .bias_correction = false},
     {.step = 7, .learning_rate = 0.1, .gradient_factor = 0.5f}},
    {"AdamWWithCycledBetas",
     {.weight_decay = 0.01},
     {.step = 1000, .learning_rate = 1e-4, .beta1 = 0.83, .beta2 = 0.99}},
    {"Sgd", {.type = OptimizerType::kSgd, .weight_decay = 0.1}, {.step = 2, .learning_rate = 0.3}},
    {"SgdWithMomentum",
     {.type = OptimizerType::kSgd, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.3},
     {.step = 2, .learning_rate = 0.3, .gradient_factor = 0.7f}},
    {"SgdWithNesterovMomentum",
     {.type = OptimizerType::kSgd, .momentum = 0.9, .nesterov = true},
     {.step = 2, .learning_rate = 0.3}},
    {"SgdsFirstStep",
     {.type = OptimizerType::kSgd, .momentum = 0.9, .dampening = 0.3},
     {.step = 1, .learning_rate = 0.3}},
    {"Lion",
     {.type = OptimizerType::kLion, .beta2 = 0.99, .weight_decay = 0.1},
     {.step = 3, .learning_rate = 0.01, .gradient_factor = 0.37f}},
    {"LionWithCycledBetas",
     {.type = OptimizerType::kLion},
     {.step = 9, .learning_rate = 0.01, .beta1 = 0.83, .beta2 = 0.95}},
    {"Adagrad",
     {.type = OptimizerType::kAdagrad, .epsilon = 1e-10, .weight_decay = 0.1, .lr_decay = 0.25},
     {.step = 3, .learning_rate = 0.1, .gradient_factor = 0.37f}},
    {"Rmsprop",
     {.type = OptimizerType::kRmsprop, .alpha = 0.9},
     {.step = 3, .learning_rate = 0.01, .gradient_factor = 0.37f}},
    {"RmspropWithMomentum",
     {.type = OptimizerType::kRmsprop, .weight_decay = 0.1, .momentum = 0.7},
     {.step = 3, .learning_rate = 0.01}},
    {"CenteredRmsprop",
     {.type = OptimizerType::kRmsprop, .weight_decay = 0.1, .centered = true},
     {.step = 3, .learning_rate = 0.01}},
    {"CenteredRmspropWithMomentum",
     {.type = OptimizerType::kRmsprop, .momentum = 0.7, .alpha = 0.8, .centered = true},
     {.step = 3, .learning_rate = 0.01, .gradient_factor = 0.5f}},
    {"Lamb",
     {.type = OptimizerType::kLamb, .weight_decay = 0.1},
     {.step = 3, .learning_rate = 0.01, .gradient_factor = 0.37f, .trust_ratio = 1.7}},
    {"LambWithEpsilonInsideTheRoot",
     {.type = OptimizerType::kLamb, .epsilon = 1e-6, .epsilon_inside_root = true},
     {.step = 2, .learning_rate = 0.01, .trust_ratio = 0.3}},
    {"LambWithoutBiasCorrection",
     {.type = OptimizerType::kLamb, .bias_correction = false},
     {.step = 5, .learning_rate = 0.1, .beta1 = 0.83, .beta2 = 0.99}},
    {"Lars",
     {.type = OptimizerType::kLars, .weight_decay = 0.1},
     {.step = 2, .learning_rate = 0.3, .gradient_factor = 0.7f, .trust_ratio = 0.01}},
    {"LarsWithMomentum",
     {.type = OptimizerType::kLars, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.3},
     {.step = 2, .learning_rate = 0.3, .trust_ratio = 0.3}},
    {"LarssFirstStepWithNesterovMomentum",
     {.type = OptimizerType::kLars, .momentum = 0.9, .nesterov = true},
     {.step = 1, .learning_rate = 0.3, .trust_ratio = 0.3}},
};

// The numbers that its first state may have before an update: averages of squares have no sign.
inline Range RangeOfFirstState(const Rule& rule) {
  const UpdateRule update_rule = UpdateRuleOf(rule.optimizer);
  const bool squares = update_rule == UpdateRule::kAdagrad || IsRmsprop(update_rule);
  return squares ? Range::kPositive : Range::kAll;
}

}  // namespace ebb::optim
