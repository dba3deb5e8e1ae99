// The update of one unit, on the update stream.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/interval.h"

namespace ebb {

// Neighbouring elements of a shard with the same options become one run; padding joins the run
// before it and stays zero.
void Executor::MakeUpdateRuns() {
  for (const auto& [name, group] : config_.ebb.parameter_groups) {
    OptimizerConfig optimizer = group.optimizer.value_or(config_.optimizer);
    if (group.weight_decay) optimizer.weight_decay = *group.weight_decay;
    group_optimizers_[name] = optimizer;
  }
  update_runs_.resize(model_.units.size());
  for (size_t u = 0; u < model_.units.size(); ++u) {
    const sharding::Section& section = plan().layout.units[u].trainable;
    const bool whole = plan().decisions.stage == 0;
    const int64_t begin = whole ? 0 : shard_ * section.shard,
                  elements = storage_->UpdatedElements(static_cast<int>(u));
    const std::string* group = nullptr;
    std::vector<UpdateRun>& runs = update_runs_[u];
    for (const sharding::Interval& interval :
         sharding::IntervalsIn(section, begin, begin + elements)) {
      const std::string& own = model_[interval.parameter].group;
      if (!runs.empty() && *group == own) continue;
      group = &own;
      const auto options = config_.ebb.parameter_groups.find(own);
      const bool found = options != config_.ebb.parameter_groups.end();
      if (!runs.empty()) runs.back().count = interval.offset - runs.back().offset;
      runs.push_back({.offset = runs.empty() ? 0 : interval.offset,
                      .optimizer = found ? &group_optimizers_[own] : &config_.optimizer,
                      .lr_factor = found ? options->second.lr_factor : 1,
                      .own_rate = found && options->second.optimizer.has_value()});
    }
    if (!runs.empty()) runs.back().count = elements - runs.back().offset;
  }
}

Executor::StepScalars Executor::ScalarsFor(double norm) const {
  StepScalars scalars{.apply = true, .step = applied_steps_ + 1};
  double factor = 1.0 / loss_scale_;
  if (config_.gradient_clipping > 0)
    factor /= std::max(1.0, (norm + 1e-6) / config_.gradient_clipping);
  scalars.gradient_factor = static_cast<float>(factor);
  scalars.rates =
      optim::RatesAt(config_.scheduler, config_.optimizer.learning_rate, applied_steps_);
  if (progress_.options.learning_rate)
    scalars.rates.learning_rate = *progress_.options.learning_rate;
  scalars.scheduled =
      config_.scheduler.type != SchedulerType::kNone || progress_.options.learning_rate.has_value();
  return scalars;
}

// A late update belongs to a step that all ranks agreed on: what goes wrong in the next one, which
// may already run, does not stop it. An early one has only what is known by now, which includes
// every collective that it comes after.
void Executor::RunUpdate(int unit, int parity, bool early) {
  const StepScalars& scalars = scalars_[parity];
  if (!scalars.apply || HasFailed()) return;
  if (early && (Blocked(parity) || !CommunicationError().ok())) return;
  if (options_.optimizer) {
    if (absl::Status status = RunOwnOptimizer(unit, scalars); !status.ok()) {
      Fail(absl::Status(status.code(),
                        absl::StrCat("the engine has failed: its optimizer, in unit '",
                                     model_.units[unit].name, "': ", status.message())));
    }
    return;
  }
  const sharding::Decisions& decisions = plan().decisions;
  const int64_t gradient_size = SizeOf(decisions.shard_dtype(unit)),
                parameter_size = SizeOf(decisions.compute);
  std::byte* const parameter = storage_->UpdatedParameter(unit);
  for (const UpdateRun& run : update_runs_[unit]) {
    optim::UpdateArrays arrays{
        .master = storage_->Master(unit) + run.offset,
        .gradient = storage_->ReducedGradient(unit) + run.offset * gradient_size,
        .gradient_dtype = decisions.shard_dtype(unit),
        .parameter = parameter == nullptr ? nullptr : parameter + run.offset * parameter_size,
        .parameter_dtype = decisions.compute,
        .count = run.count};
    for (int k = 0; k < decisions.optimizer_states; ++k)
      arrays.states[k] = storage_->State(unit, k) + run.offset;
    const double rate = run.own_rate && !scalars.scheduled ? run.optimizer->learning_rate
                                                           : scalars.rates.learning_rate;
    optim::Update(update_->team(), *run.optimizer, arrays,
                  {.step = scalars.step,
                   .learning_rate = rate * run.lr_factor,
                   .beta1 = scalars.rates.beta1,
                   .beta2 = scalars.rates.beta2,
                   .gradient_factor = scalars.gradient_factor});
  }
}

absl::Status Executor::RunOwnOptimizer(int unit, const StepScalars& scalars) {
  const sharding::Decisions& decisions = plan().decisions;
  const sharding::Section& section = plan().layout.units[unit].trainable;
  const int64_t begin = decisions.stage == 0 ? 0 : shard_ * section.shard,
                elements = storage_->UpdatedElements(unit);
  float* const staging = storage_->GradientStaging();
  std::vector<std::span<float>> states(static_cast<size_t>(decisions.optimizer_states));
  for (const sharding::Interval& interval :
       sharding::IntervalsIn(section, begin, begin + elements)) {
    const ParameterSpec& parameter = model_[interval.parameter];
    const size_t count = static_cast<size_t>(interval.end - interval.begin);
    optim::Cast(
        update_->team(),
        storage_->ReducedGradient(unit) + interval.offset * SizeOf(decisions.shard_dtype(unit)),
        decisions.shard_dtype(unit), staging, DType::kFloat32, static_cast<int64_t>(count),
        optim::Rounding::kNearest);
    for (size_t i = 0; i < count; ++i) staging[i] *= scalars.gradient_factor;
    for (int k = 0; k < decisions.optimizer_states; ++k)
      states[k] = {storage_->State(unit, k) + interval.offset, count};
    const auto group = config_.ebb.parameter_groups.find(parameter.group);
    const double lr_factor =
        group == config_.ebb.parameter_groups.end() ? 1 : group->second.lr_factor;
    const UpdateSlice slice{.slice = {.parameter = interval.parameter,
                                      .name = parameter.name,
                                      .shape = parameter.shape,
                                      .begin = interval.begin,
                                      .end = interval.end},
                            .group = parameter.group,
                            .step = scalars.step,
                            .learning_rate = scalars.rates.learning_rate * lr_factor,
                            .master = {storage_->Master(unit) + interval.offset, count},
                            .gradient = {staging, count},
                            .states = states,
                            .stream = {}};
    if (absl::Status status = options_.optimizer->update(slice); !status.ok()) return status;
  }
  if (std::byte* const copy = storage_->UpdatedParameter(unit)) {
    optim::Cast(update_->team(), storage_->Master(unit), DType::kFloat32, copy, decisions.compute,
                elements, optim::Rounding::kParameter);
  }
  return absl::OkStatus();
}

}  // namespace ebb
