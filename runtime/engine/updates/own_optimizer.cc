#include "ebb/runtime/engine/updates/own_optimizer.h"

#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/split.h"

namespace ebb {

OwnOptimizer::OwnOptimizer(const OptimizerSpec& spec, const ModelSpec& model, const Config& config,
                           const sharding::Plan& plan, int slice)
    : spec_(spec) {
  for (const sharding::SubGroup& group : plan.table.sub_groups) {
    std::vector<Piece>& pieces = pieces_.emplace_back();
    const sharding::Section& section = plan.layout.units[static_cast<size_t>(group.unit)].trainable;
    const int64_t begin = sharding::UpdatedBy(plan, group.unit, slice).begin + group.begin;
    for (const sharding::Interval& interval :
         sharding::IntervalsIn(section, begin, begin + group.count())) {
      const ParameterSpec& parameter = model[interval.parameter];
      const auto named = config.ebb.parameter_groups.find(parameter.group);
      const auto add = [&](const Slice& of_whole, int64_t local) {
        pieces.push_back(
            {.slice = of_whole,
             .parameter = &parameter,
             .group = named == config.ebb.parameter_groups.end() ? nullptr : &named->second,
             .at = interval.offset + local});
        return absl::OkStatus();
      };
      ForEachSlice(model, interval.parameter, interval.begin, interval.end, add).IgnoreError();
    }
  }
}

absl::Status OwnOptimizer::Update(const Work& of, const StepConstants& constants,
                                  const StepScalars& scalars, optim::Kernels& kernels,
                                  Stream& stream) const {
  const optim::UpdateArrays& arrays = of.arrays;
  const bool keeps_whole = arrays.form() == optim::MasterForm::kWhole;
  std::vector<std::span<float>> states(of.states.size());
  for (const Piece& piece : pieces_[static_cast<size_t>(of.sub_group)]) {
    const int64_t count = piece.slice.end - piece.slice.begin, at = piece.at;
    kernels.Scale(
        stream, static_cast<const std::byte*>(arrays.gradient) + at * SizeOf(arrays.gradient_dtype),
        arrays.gradient_dtype, scalars.gradient_factor, of.gradient, count);
    for (size_t k = 0; k < states.size(); ++k)
      states[k] = {reinterpret_cast<float*>(of.states[k]) + at, static_cast<size_t>(count)};
    float* const values = keeps_whole ? arrays.master + at : of.master;
    optim::MasterArrays kept;
    if (!keeps_whole) {
      kept = {.master = values,
              .parameter = static_cast<BFloat16*>(arrays.parameter) + at,
              .low = arrays.master_low == nullptr ? nullptr : arrays.master_low + at,
              .count = count,
              .rounding = {arrays.rounding.unit, arrays.rounding.index + at},
              .step = scalars.step};
      kernels.LoadMaster(stream, kept);
    }
    const UpdateSlice slice{.slice = piece.slice,
                            .group = piece.parameter->group,
                            .step = scalars.step,
                            .learning_rate = constants.LearningRateOf(piece.group, scalars),
                            .master = {values, static_cast<size_t>(count)},
                            .gradient = {of.gradient, static_cast<size_t>(count)},
                            .states = states,
                            .stream = stream.view()};
    if (absl::Status status = spec_.update(slice); !status.ok()) return status;
    if (!keeps_whole) kernels.StoreMaster(stream, kept);
  }
  if (arrays.parameter != nullptr && keeps_whole) {
    kernels.Cast(stream, arrays.master, DType::kFloat32, arrays.parameter, arrays.parameter_dtype,
                 arrays.count, optim::Rounding::kParameter);
  }
  return absl::OkStatus();
}

bool OwnOptimizerEnqueues(const Core& core) {
  const EngineInputs& inputs = core.inputs;
  const std::vector<sharding::SubGroup>& groups = core.plans.plan().table.sub_groups;
  return inputs.options.optimizer && !HostReaches(inputs.device) &&
         std::any_of(groups.begin(), groups.end(),
                     [](const sharding::SubGroup& group) { return group.tier == Tier::kDevice; });
}

}  // namespace ebb
