#include <cmath>
#include <string>
#include <utility>

#include "ebb/runtime/config/convert.h"
#include "ebb/runtime/config/io_backend.h"
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

constexpr std::string_view kParam = "zero_optimization.offload_param";
constexpr std::string_view kOptimizer = "zero_optimization.offload_optimizer";

// `device` of an offload block, at the stage that is given.
absl::Status CheckDevice(std::string_view block, Tier device, bool has_path, int stage,
                         int stage_least, std::string_view why) {
  if (device == Tier::kDevice) return absl::OkStatus();
  const std::string given = Join({Quoted(Join({block, ".device"})), " is ", Quoted(Name(device))});
  if (stage < stage_least) {
    return Invalid(
        {given, ", but at \"zero_optimization.stage\" ", std::to_string(stage), " ", why});
  }
  if (device == Tier::kNvme && !has_path) {
    return Invalid({given, ", but ", Quoted(Join({block, ".nvme_path"})),
                    " is not given; give a folder on the disk, or several in brackets"});
  }
  return absl::OkStatus();
}

absl::Status CheckTiers(const Config& config) {
  const ZeroConfig& zero = config.zero;
  const bool has_param_path = !zero.offload_param.nvme_paths.empty();
  const bool has_optimizer_path = !zero.offload_optimizer.nvme_paths.empty();
  EBB_RETURN_IF_ERROR(
      CheckDevice(kParam, zero.offload_param.device, has_param_path, zero.stage, 3,
                  "every rank keeps all parameters (DeepSpeed ignores the key there); remove it "
                  "or use stage 3"));
  EBB_RETURN_IF_ERROR(
      CheckDevice(kOptimizer, zero.offload_optimizer.device, has_optimizer_path, zero.stage, 1,
                  "every rank keeps all optimizer states; remove it or use stage 1, 2 or 3"));
  if (const Tier gradients = config.ebb.offload_gradients.value_or(Tier::kDevice);
      zero.stage == 0 && gradients != Tier::kDevice) {
    return Invalid({"\"ebb.offload_gradients\" is ", Quoted(Name(gradients)),
                    ", but at \"zero_optimization.stage\" 0 every rank keeps all gradients; remove "
                    "it or use stage 1, 2 or 3"});
  }
  if (has_param_path || has_optimizer_path) return absl::OkStatus();
  for (const auto& [key, tier] :
       {std::pair("ebb.offload_gradients", config.ebb.offload_gradients),
        std::pair("ebb.offload_activations", config.ebb.offload_activations)}) {
    if (tier == Tier::kNvme) {
      return Invalid({Quoted(key), " is \"nvme\", but no folder is given; set ",
                      Quoted(Join({kOptimizer, ".nvme_path"})), " or ",
                      Quoted(Join({kParam, ".nvme_path"}))});
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBlockSize(int64_t bytes) {
  if (bytes % kDiskAlignment == 0) return absl::OkStatus();
  const int64_t below = bytes / kDiskAlignment * kDiskAlignment;
  return Invalid({"\"aio.block_size\" is ", std::to_string(bytes), "; allowed: a multiple of ",
                  std::to_string(kDiskAlignment), "; the nearest are ", std::to_string(below),
                  " and ", std::to_string(below + kDiskAlignment)});
}

absl::Status CheckSplitMaster(const Config& config) {
  if (!config.ebb.split_master || config.compute == DType::kBFloat16) return absl::OkStatus();
  return Invalid({"\"ebb.split_master\" is true, but the compute dtype is ", Name(config.compute),
                  ": only a bf16 parameter is half of its master; remove it or set \"bf16\": "
                  "{\"enabled\": true}"});
}

absl::Status CheckStochasticRounding(const Config& config) {
  if (!config.ebb.stochastic_rounding) return absl::OkStatus();
  if (config.compute != DType::kBFloat16) {
    return Invalid({"\"ebb.stochastic_rounding\" is true, but the compute dtype is ",
                    Name(config.compute),
                    ": only bf16 parameters are rounded so; remove it or set \"bf16\": "
                    "{\"enabled\": true}"});
  }
  if (!config.ebb.split_master) return absl::OkStatus();
  return Invalid(
      {"\"ebb.stochastic_rounding\" and \"ebb.split_master\" are both true: the first "
       "keeps no masters, the second half of each beside the parameter; remove one"});
}

}  // namespace

absl::Status CheckTogether(const Config& config) {
  if (config.compute == DType::kInt8) {
    return Invalid({"the compute dtype is int8; allowed: ", Alternatives("fp32|bf16|fp16")});
  }
  EBB_RETURN_IF_ERROR(CheckOptimizer(config.optimizer, "optimizer"));
  EBB_RETURN_IF_ERROR(CheckLossScale(config));
  EBB_RETURN_IF_ERROR(CheckTiers(config));
  EBB_RETURN_IF_ERROR(CheckBlockSize(config.aio.block_size));
  EBB_RETURN_IF_ERROR(CheckSplitMaster(config));
  EBB_RETURN_IF_ERROR(CheckStochasticRounding(config));
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
