// The scalars of one update as its elements use them. The host computes each in double from the
// configuration's doubles and rounds it to fp32 once, so that every kernel of every device starts
// from the same bits.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "ebb/optim/update_arrays.h"

namespace ebb {
class ThreadTeam;
struct OptimizerConfig;
}  // namespace ebb

namespace ebb::optim {

struct UpdateScalars;

// The rules of update_element.inc, one for each set of states that is kept.
enum class UpdateRule : uint8_t {
  kAdam,
  kSgd,
  kSgdWithMomentum,
  kLion,
  kAdagrad,
  kRmsprop,
  kRmspropWithMomentum,
  kCenteredRmsprop,
  kCenteredRmspropWithMomentum,
  kLamb,
  kLars,
  kLarsWithMomentum,
  kMuonMomentum,
  kMuon,
};
inline constexpr int kUpdateRules = 14;
UpdateRule UpdateRuleOf(const OptimizerConfig& optimizer);

constexpr bool IsRmsprop(UpdateRule rule) {
  return rule >= UpdateRule::kRmsprop && rule <= UpdateRule::kCenteredRmspropWithMomentum;
}
constexpr bool IsLars(UpdateRule rule) {
  return rule == UpdateRule::kLars || rule == UpdateRule::kLarsWithMomentum;
}
// Whether an update needs norms of whole parameters first (parameter_norms.h).
constexpr bool TakesNorms(UpdateRule rule) {
  return rule == UpdateRule::kLamb || IsLars(rule);
}
// How many of the states the norms read.
constexpr int StatesOfNorms(UpdateRule rule) {
  return rule == UpdateRule::kLamb ? 2 : 0;
}
constexpr bool HasMomentumBuffer(UpdateRule rule) {
  return rule == UpdateRule::kSgdWithMomentum || rule == UpdateRule::kLarsWithMomentum ||
         rule == UpdateRule::kRmspropWithMomentum ||
         rule == UpdateRule::kCenteredRmspropWithMomentum;
}
constexpr bool IsCentered(UpdateRule rule) {
  return rule == UpdateRule::kCenteredRmsprop || rule == UpdateRule::kCenteredRmspropWithMomentum;
}
// How many states the rule keeps for each element.
constexpr int StatesOf(UpdateRule rule) {
  if (rule == UpdateRule::kAdam || rule == UpdateRule::kLamb) return 2;
  if (rule == UpdateRule::kLion || rule == UpdateRule::kAdagrad ||
      rule == UpdateRule::kMuonMomentum)
    return 1;
  return (IsRmsprop(rule) ? 1 : 0) + (HasMomentumBuffer(rule) ? 1 : 0) + (IsCentered(rule) ? 1 : 0);
}

// Whether the rule's states in these arrays are all fp32.
constexpr bool HasFp32States(UpdateRule rule, const UpdateArrays& arrays) {
  for (int s = 0; s < StatesOf(rule); ++s) {
    if (!arrays.states[s].is_fp32()) return false;
  }
  return true;
}

// The weight of an average's step, beta * average + (1 - beta) * g, rounded once: of one from the
// average to g, or, negative, of one from g to the average (Average in update_element.inc). The
// shorter of the two steps, so that an average with a beta of 0 is g itself.
constexpr float AverageWeight(double beta) {
  return static_cast<float>(beta < 0.5 ? -beta : 1 - beta);
}

struct AdamConstants {
  float gradient_factor;
  float l2;               // weight decay that is added to the gradient; 0: none
  float decay;            // 1 - learning_rate * weight_decay if decoupled, otherwise 1
  float momentum_weight;  // AverageWeight(beta1)
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

struct LionConstants {
  float gradient_factor;
  float decay;                              // 1 - learning_rate * weight_decay
  float direction_weight, momentum_weight;  // AverageWeight of beta1, and of beta2
  float minus_learning_rate;
};

struct AdagradConstants {
  float gradient_factor;
  float l2;
  float epsilon;
  float minus_learning_rate;  // this step's rate, with lr_decay
};

struct RmspropConstants {
  float gradient_factor;
  float l2;
  float alpha, one_minus_alpha;
  float epsilon;
  float momentum;
  float minus_learning_rate;
};

struct LambConstants {
  float gradient_factor;
  float weight_decay;
  float momentum_weight;  // AverageWeight(beta1)
  float beta2, one_minus_beta2;
  float momentum_correction;  // 1 / (1 - beta1^step), or 1 without bias correction
  float variance_correction;  // 1 / (1 - beta2^step), or 1
  float root_correction;      // square root of variance_correction
  float epsilon;
  bool epsilon_inside_root;
  float minus_step_size;  // -learning_rate * trust_ratio
};

struct LarsConstants {
  float gradient_factor;
  float l2;
  float trust_ratio;
  float momentum, one_minus_dampening;
  float minus_learning_rate;
  bool first, nesterov;
};

struct MuonConstants {
  float gradient_factor;
  float momentum, one_minus_momentum;
  float decay;  // 1 - learning_rate * weight_decay
  float minus_learning_rate;
  bool nesterov;
};

AdamConstants AdamConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);
SgdConstants SgdConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);
LionConstants LionConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);
AdagradConstants AdagradConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);
RmspropConstants RmspropConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);
LambConstants LambConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);
LarsConstants LarsConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);
MuonConstants MuonConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);

// The constants that an update reads when it runs, not when it is enqueued, so that a step's
// verdict may come in between. Trivially copyable and without initializers, because it lies in
// memory that host and device reach.
struct UpdateConstants {
  int64_t step;  // the number of the applied update: random bits differ from step to step
  bool apply;    // false: the update writes nothing
  AdamConstants adam;
  SgdConstants sgd;
  LionConstants lion;
  AdagradConstants adagrad;
  RmspropConstants rmsprop;
  LambConstants lamb;
  LarsConstants lars;
  MuonConstants muon;
};

// `apply` is true. Only the constants of the optimizer's rule are set.
UpdateConstants UpdateConstantsOf(const OptimizerConfig& optimizer, const UpdateScalars& scalars);

// The constants of a rule.
template <UpdateRule kRule>
constexpr const auto& ConstantsIn(const UpdateConstants& set) {
  if constexpr (kRule == UpdateRule::kAdam) {
    return set.adam;
  } else if constexpr (kRule == UpdateRule::kLion) {
    return set.lion;
  } else if constexpr (kRule == UpdateRule::kAdagrad) {
    return set.adagrad;
  } else if constexpr (IsRmsprop(kRule)) {
    return set.rmsprop;
  } else if constexpr (kRule == UpdateRule::kLamb) {
    return set.lamb;
  } else if constexpr (IsLars(kRule)) {
    return set.lars;
  } else if constexpr (kRule == UpdateRule::kMuonMomentum || kRule == UpdateRule::kMuon) {
    return set.muon;
  } else {
    return set.sgd;
  }
}
template <UpdateRule kRule>
using ConstantsOf =
    std::remove_cvref_t<decltype(ConstantsIn<kRule>(std::declval<UpdateConstants&>()))>;

// Calls visit.operator()<rule>(), for a rule that is known only at run time.
template <class Visit>
auto WithRule(UpdateRule rule, const Visit& visit) {
  using enum UpdateRule;
  switch (rule) {
    case kAdam:
      break;
    case kSgd:
      return visit.template operator()<kSgd>();
    case kSgdWithMomentum:
      return visit.template operator()<kSgdWithMomentum>();
    case kLion:
      return visit.template operator()<kLion>();
    case kAdagrad:
      return visit.template operator()<kAdagrad>();
    case kRmsprop:
      return visit.template operator()<kRmsprop>();
    case kRmspropWithMomentum:
      return visit.template operator()<kRmspropWithMomentum>();
    case kCenteredRmsprop:
      return visit.template operator()<kCenteredRmsprop>();
    case kCenteredRmspropWithMomentum:
      return visit.template operator()<kCenteredRmspropWithMomentum>();
    case kLamb:
      return visit.template operator()<kLamb>();
    case kLars:
      return visit.template operator()<kLars>();
    case kLarsWithMomentum:
      return visit.template operator()<kLarsWithMomentum>();
    case kMuonMomentum:
      return visit.template operator()<kMuonMomentum>();
    case kMuon:
      return visit.template operator()<kMuon>();
  }
  return visit.template operator()<kAdam>();
}

// The core of update.h's Update.
void Update(ThreadTeam& team, UpdateRule rule, const UpdateArrays& arrays,
            const UpdateConstants& constants);

}  // namespace ebb::optim
