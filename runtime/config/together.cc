#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/base/io_backend.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/convert.h"

namespace ebb::config {
namespace {

void CheckOptimizer(const OptimizerConfig& optimizer, const std::string& path, Problems& problems) {
  using enum OptimizerType;
  const OptimizerType type = optimizer.type;
  if (type == kAdamW && !optimizer.decoupled_weight_decay) {
    problems.AddConflict(path, {": AdamW decouples weight decay; choose Adam"});
  }
  if ((type == kSgd || type == kLars) && optimizer.nesterov &&
      (optimizer.momentum <= 0 || optimizer.dampening != 0)) {
    problems.AddConflict(path + ".params.nesterov",
                         {" needs \"momentum\" above 0 and \"dampening\" 0"});
  }
  if (type == kLamb && optimizer.min_coefficient > optimizer.max_coefficient) {
    problems.AddConflict(path + ".params.min_coeff",
                         {" ", Shown(optimizer.min_coefficient), " is above \"max_coeff\" ",
                          Shown(optimizer.max_coefficient)});
  }
  if (TakesNorms(type) && optimizer.states != OptimizerStates::kFloat32) {
    problems.AddConflict(
        path + ".params.states",
        {" is not fp32 (\"bf16.bf16_optimizer_states\" makes it bf16), but LAMB and "
         "LARS take norms of updates, for which their states are kept in fp32; "
         "choose another optimizer, or fp32"});
  }
  // For elements that never had a gradient the update would be 0 / 0, and so would the norm of
  // their parameter.
  if (type == kLamb && static_cast<float>(optimizer.epsilon) == 0) {
    problems.AddConflict(
        path + ".params.eps",
        {" is 0 as an fp32 number; Lamb divides by it where there was no gradient"});
  }
}

void CheckLossScale(const Config& config, Problems& problems) {
  const LossScaleConfig& scale = config.loss_scale;
  if (config.compute != DType::kFloat16 || scale.static_scale != 0) return;
  const double start = std::ldexp(1.0, static_cast<int>(scale.initial_scale_power));
  if (scale.min_scale <= start) return;
  problems.AddConflict(
      "fp16.min_loss_scale",
      {" ", Shown(scale.min_scale),
       " is above the initial scale, 2 to \"fp16.initial_scale_power\" = ", Shown(start)});
}

constexpr std::string_view kParam = "zero_optimization.offload_param";
constexpr std::string_view kOffloadOptimizer = "zero_optimization.offload_optimizer";

// Checks `device` of an offload block at the given stage.
void CheckDevice(std::string_view block, Tier device, bool has_path, int stage, int stage_least,
                 std::string_view why, Problems& problems) {
  if (device == Tier::kDevice) return;
  const std::string key = Join({block, ".device"});
  const std::string given = Join({" is ", Quoted(Name(device)), ", but "});
  if (stage < stage_least) {
    problems.AddConflict(
        key, {given, "at \"zero_optimization.stage\" ", std::to_string(stage), " ", why});
  }
  if (device == Tier::kNvme && !has_path) {
    problems.AddConflict(key, {given, Quoted(Join({block, ".nvme_path"})),
                               " is not given; give a folder on the disk, or several in brackets"});
  }
}

void CheckTiers(const Config& config, Problems& problems) {
  const ZeroConfig& zero = config.zero;
  const bool has_param_path = !zero.offload_param.nvme_paths.empty();
  const bool has_optimizer_path = !zero.offload_optimizer.nvme_paths.empty();
  CheckDevice(kParam, zero.offload_param.device, has_param_path, zero.stage, 3,
              "every rank keeps all parameters; remove it or use stage 3", problems);
  CheckDevice(kOffloadOptimizer, zero.offload_optimizer.device, has_optimizer_path, zero.stage, 1,
              "every rank keeps all optimizer states; remove it or use stage 1, 2 or 3", problems);
  if (const Tier gradients = config.ebb.offload_gradients.value_or(Tier::kDevice);
      zero.stage == 0 && gradients != Tier::kDevice) {
    problems.AddConflict("ebb.offload_gradients",
                         {" is ", Quoted(Name(gradients)),
                          ", but at \"zero_optimization.stage\" 0 every rank keeps all gradients; "
                          "remove it or use stage 1, 2 or 3"});
  }
  if (has_param_path || has_optimizer_path) return;
  for (const auto& [key, tier] :
       {std::pair("ebb.offload_gradients", config.ebb.offload_gradients),
        std::pair("ebb.offload_activations", config.ebb.offload_activations)}) {
    if (tier == Tier::kNvme) {
      problems.AddConflict(key, {" is \"nvme\", but no folder is given; set ",
                                 Quoted(Join({kOffloadOptimizer, ".nvme_path"})), " or ",
                                 Quoted(Join({kParam, ".nvme_path"}))});
    }
  }
}

void CheckBlockSize(int64_t bytes, Problems& problems) {
  if (bytes % kDiskAlignment == 0) return;
  const int64_t below = bytes / kDiskAlignment * kDiskAlignment;
  problems.AddConflict("aio.block_size",
                       {" is ", std::to_string(bytes), "; allowed: a multiple of ",
                        std::to_string(kDiskAlignment), "; the nearest are ", std::to_string(below),
                        " and ", std::to_string(below + kDiskAlignment)});
}

void CheckMasters(const Config& config, Problems& problems) {
  const auto needs_bf16 = [&](std::string_view key, bool is_on, std::string_view why) {
    if (!is_on || config.compute == DType::kBFloat16) return;
    problems.AddConflict(key, {" is true, but the compute dtype is ", Name(config.compute), ": ",
                               why, "; remove it or set \"bf16\": {\"enabled\": true}"});
  };
  needs_bf16("ebb.split_master", config.ebb.split_master,
             "only a bf16 parameter is half of its master");
  needs_bf16("ebb.stochastic_rounding", config.ebb.stochastic_rounding,
             "only bf16 parameters are rounded at random");
  if (config.ebb.stochastic_rounding && config.ebb.split_master) {
    problems.AddConflict("ebb.stochastic_rounding",
                         {" and \"ebb.split_master\" are both true: the first keeps no "
                          "masters, the second keeps half of each; remove one"});
  }
}

void CheckMesh(const MeshConfig& mesh, Problems& problems) {
  if (mesh.pipeline == 1) return;
  problems.AddConflict("ebb.mesh.pipeline",
                       {" is ", std::to_string(mesh.pipeline),
                        ", but the engine has no pipeline; set it to 1, and let each stage be an "
                        "engine on a part of the world (World::Split)"});
}

std::vector<const OptimizerConfig*> MuonsOf(const Config& config) {
  std::vector<const OptimizerConfig*> muons;
  if (config.optimizer.type == OptimizerType::kMuon) muons.push_back(&config.optimizer);
  for (const auto& [name, group] : config.ebb.parameter_groups) {
    if (group.optimizer && group.optimizer->type == OptimizerType::kMuon)
      muons.push_back(&*group.optimizer);
  }
  return muons;
}

void CheckGroup(const Config& config, const std::string& name, const ParameterGroupConfig& group,
                Problems& problems) {
  const std::string path = Join({"ebb.parameter_groups.", name});
  if (name.empty()) {
    problems.AddConflict("ebb.parameter_groups",
                         {" has a group without a name; give it one "
                          "(parameters without a group use \"optimizer\")"});
  }
  const OptimizerConfig& optimizer = group.optimizer ? *group.optimizer : config.optimizer;
  if (optimizer.type != OptimizerType::kMuon &&
      (group.use_muon || group.muon_matrices.size() > 1)) {
    problems.AddConflict(Join({path, group.use_muon ? ".use_muon" : ".muon_matrices"}),
                         {" is given, but the optimizer of the group is not Muon; choose that, or "
                          "leave it out"});
  }
  // An exchange has matrices of one type.
  for (const OptimizerConfig* const other : MuonsOf(config)) {
    if (optimizer.type != OptimizerType::kMuon ||
        optimizer.newton_schulz_dtype == other->newton_schulz_dtype)
      continue;
    problems.AddConflict(
        path + ".optimizer.params.ns_dtype",
        {" differs from that of another optimizer that is Muon; give all the same"});
    break;
  }
  if (!group.optimizer.has_value()) return;
  CheckOptimizer(*group.optimizer, path + ".optimizer", problems);
  const OptimizerStates states = config.optimizer.states;
  if (group.optimizer->states != OptimizerStates::kFloat32 && group.optimizer->states != states) {
    problems.AddConflict(path + ".optimizer.params.states",
                         {" differs from \"optimizer.params.states\", which is for the states of "
                          "all groups; set it there, and leave it out here"});
  }
  if (states != OptimizerStates::kFloat32 && TakesNorms(group.optimizer->type)) {
    problems.AddConflict("optimizer.params.states",
                         {" is not fp32, but \"", path,
                          ".optimizer\" is LAMB or LARS, whose "
                          "states are; choose another optimizer, or fp32"});
  }
  if (group.weight_decay.has_value()) {
    problems.AddConflict(
        path,
        {" has \"weight_decay\" and an \"optimizer\" of its own; give it in \"optimizer.params\""});
  }
}

}  // namespace

void CheckTogether(const Config& config, Problems& problems) {
  if (config.compute == DType::kInt8) {
    problems.AddTogether("",
                         {"the compute dtype is int8; allowed: ", Alternatives("fp32|bf16|fp16")});
  }
  CheckOptimizer(config.optimizer, "optimizer", problems);
  CheckLossScale(config, problems);
  CheckTiers(config, problems);
  CheckBlockSize(config.aio.block_size, problems);
  CheckMasters(config, problems);
  CheckMesh(config.ebb.mesh, problems);
  for (const auto& [name, group] : config.ebb.parameter_groups)
    CheckGroup(config, name, group, problems);
}

}  // namespace ebb::config
