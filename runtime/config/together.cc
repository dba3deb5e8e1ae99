#include <cmath>
#include <string>

#include "ebb/runtime/config/convert.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::config {
namespace {

absl::Status CheckOptimizer(const OptimizerConfig& optimizer, const std::string& path) {
  if (optimizer.type == OptimizerType::kAdamW && !optimizer.decoupled_weight_decay) {
    return Invalid({Quoted(path), ": AdamW decouples weight decay; choose Adam"});
  }
  if (optimizer.type == OptimizerType::kSgd && optimizer.nesterov &&
      (optimizer.momentum <= 0 || optimizer.dampening != 0)) {
    return Invalid(
        {Quoted(path + ".params.nesterov"), " needs \"momentum\" above 0 and \"dampening\" 0"});
  }
  return absl::OkStatus();
}

absl::Status CheckLossScale(const Config& config) {
  const LossScaleConfig& scale = config.loss_scale;
  if (config.compute != DType::kFloat16 || scale.static_scale != 0) return absl::OkStatus();
  const double start = std::ldexp(1.0, static_cast<int>(scale.initial_scale_power));
  if (scale.min_scale <= start) return absl::OkStatus();
  return Invalid(
      {"\"fp16.min_loss_scale\" ", Shown(scale.min_scale),
       " is above what the scale starts at, 2 to \"fp16.initial_scale_power\" = ", Shown(start)});
}

}  // namespace

absl::Status CheckTogether(const Config& config) {
  if (config.compute == DType::kInt8) {
    return Invalid({"the compute dtype is int8; allowed: ", Alternatives("fp32|bf16|fp16")});
  }
  EBB_RETURN_IF_ERROR(CheckOptimizer(config.optimizer, "optimizer"));
  EBB_RETURN_IF_ERROR(CheckLossScale(config));
  for (const auto& [name, group] : config.ebb.parameter_groups) {
    const std::string path = Join({"ebb.parameter_groups.", name});
    if (name.empty()) {
      return Invalid(
          {"\"ebb.parameter_groups\" has a group without a name; parameters that name "
           "no group are those of \"optimizer\""});
    }
    if (!group.optimizer.has_value()) continue;
    EBB_RETURN_IF_ERROR(CheckOptimizer(*group.optimizer, path + ".optimizer"));
    if (group.weight_decay.has_value()) {
      return Invalid({Quoted(path),
                      " has \"weight_decay\" and an \"optimizer\" of its own; give "
                      "it in \"optimizer.params\""});
    }
  }
  return absl::OkStatus();
}

}  // namespace ebb::config
