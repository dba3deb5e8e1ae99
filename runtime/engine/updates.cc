// The update of one sub-group, on the stream of where it runs.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ebb/optim/stochastic_rounding.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/interval.h"

namespace ebb {

// Of a step that begins: what its early updates read, behind the verdict on the step before.
void Executor::EnqueueEarlyScalars() {
  if (progress_.run->plan.decisions.timing != sharding::UpdateTiming::kEarly) return;
  NoteVerdict(VerdictTouch::kEarlyConstants, progress_.parity);
  const auto prepare = [this, parity = progress_.parity, rate = progress_.options.learning_rate] {
    outcome_->Prepare(parity, rate);
  };
  if (own_optimizer_enqueues_) return prepare();  // the last Finish has waited for that verdict
  reduce_->Enqueue(prepare);
  control_block_->CopyConstants(*reduce_, progress_.parity, /*early=*/true);
}

// A late update belongs to a step that all ranks agreed on: what goes wrong in the next one, which
// may already run, does not stop it. An early one has only what is known by now, which includes
// every collective that it comes after. Where kernels enqueue themselves both are enqueued before
// that is known, and look when they run, unless an optimizer of the trainer's enqueues them: the host
// has waited then for what decides.
void Executor::RunUpdate(const sharding::UpdateWork& work, int parity, bool early, Stream& stream) {
  const StepScalars& scalars = step_constants_->of(parity, early);
  const bool known = !KernelsOf(stream).enqueues() || own_optimizer_enqueues_;
  if ((known && !scalars.apply) || !outcome_->MayUpdate(parity, early) ||
      (own_optimizer_enqueues_ && !device_.status().ok()))
    return KeepParameters(work, stream);
  if (!known) KeepParameters(work, stream);  // for an update that then writes nothing
  ThreadTeam& team = stream.team();
  const sharding::SubGroup& group =
      plan().pools.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  const bool verifies = swap_verifier_->Verifies(group), in_one_pass = UpdatesInOnePass(group);
  if (verifies && !in_one_pass &&
      !swap_verifier_->AgreeStates(group, swap_verifier_->SumStates(work, team)))
    return;
  if (options_.optimizer) {
    if (absl::Status status = RunOwnOptimizer(work, scalars, stream); !status.ok()) {
      errors_.Fail(absl::Status(
          status.code(), absl::StrCat("the engine has failed: its optimizer, in unit '",
                                      model_.units[work.unit].name, "': ", status.message())));
    }
    if (verifies) swap_verifier_->SetStates(group, swap_verifier_->SumStates(work, team));
    return;
  }
  const optim::UpdateArrays arrays = ArraysOf(work);
  if (verifies && in_one_pass) {
    // Who disagrees fails the engine, and what was just written goes nowhere.
    const UpdateTable::Set& set = SetOf(group);
    const optim::UpdateChecksums sums =
        optim::UpdateAndSum(team, step_constants_->OptimizerOf(set, scalars), arrays,
                            step_constants_->ScalarsOf(set, scalars), swap_verifier_->scratch());
    if (swap_verifier_->AgreeStates(group, sums.read))
      swap_verifier_->SetStates(group, sums.written);
    return;
  }
  ForEachPart(work, parity, early, stream, [&](const PartOfUpdate& part) {
    KernelsOf(stream).Update(stream, part.rule, part.arrays, part.runs);
  });
  if (verifies) swap_verifier_->SetStates(group, swap_verifier_->SumStates(work, team));
}

void Executor::ForEachPart(const sharding::UpdateWork& work, int parity, bool early, Stream& stream,
                           absl::FunctionRef<void(const PartOfUpdate&)> visit) const {
  const sharding::SubGroup& group =
      plan().pools.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  const optim::UpdateArrays arrays = ArraysOf(work);
  const bool on_device = KernelsOf(stream).enqueues();
  const auto constants = control_block_->constants_for(on_device, parity, early);
  const auto table = control_block_->runs_for(on_device);
  for (const UpdateTable::Part& part : update_table_.parts(work.unit)) {
    const int64_t first = std::max(part.begin, group.begin), last = std::min(part.end, group.end);
    if (first >= last) continue;
    const UpdateTable::Runs in = update_table_.RunsIn(part, first, last);
    PartOfUpdate of{.rule = part.rule,
                    .arrays = optim::PartOf(arrays, first - group.begin, last - first),
                    .runs = {.constants = constants,
                             .runs = table.subspan(static_cast<size_t>(in.first),
                                                   static_cast<size_t>(in.count)),
                             .begin = first}};
    if (in.count == 1) {
      of.first_set = update_table_.runs()[static_cast<size_t>(in.first)].set;
      of.runs = {.constants = constants.subspan(static_cast<size_t>(of.first_set), 1)};
    }
    visit(of);
  }
}

// All of the work's sub-group.
optim::UpdateArrays Executor::ArraysOf(const sharding::UpdateWork& work) const {
  const sharding::Decisions& decisions = plan().decisions;
  const sharding::SubGroup& group =
      plan().pools.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  std::byte* const master = storage_->At(work.master);
  optim::UpdateArrays arrays{.gradient = storage_->At(work.gradient),
                             .gradient_dtype = decisions.shard_dtype(work.unit),
                             .parameter_dtype = decisions.compute,
                             .count = group.count()};
  if (work.writes_parameter) arrays.parameter = storage_->At(work.parameter);
  if (decisions.stochastic_rounding) {
    arrays.rounding = RoundingOf(work.unit, group.begin);
  } else if (decisions.split_master) {
    arrays.master_low = reinterpret_cast<uint16_t*>(master);
  } else {
    arrays.master = reinterpret_cast<float*>(master);
  }
  for (int k = 0; k < decisions.optimizer_states; ++k) {
    arrays.states[k] =
        reinterpret_cast<float*>(storage_->At(work.states.Plus(k * work.states_stride)));
  }
  return arrays;
}

// Of element `at` of what this rank updates: nothing that differs between cuts of a unit.
optim::RoundingPlace Executor::RoundingOf(int unit, int64_t at) const {
  const int64_t shard = plan().layout.units[static_cast<size_t>(unit)].trainable.shard;
  return {.unit = sharding::Hasher().Add(model_.units[static_cast<size_t>(unit)].name).hash(),
          .index = (plan().decisions.stage == 0 ? 0 : shard_ * shard) + at};
}

// By one optimizer with all states that the sub-group has, so that its pass can take their checksums.
bool Executor::UpdatesInOnePass(const sharding::SubGroup& group) const {
  if (options_.optimizer) return false;
  for (const UpdateTable::Part& part : update_table_.parts(group.unit)) {
    if (part.begin > group.begin || part.end < group.end || optim::TakesNorms(part.rule)) continue;
    return update_table_.RunsIn(part, group.begin, group.end).count == 1 &&
           static_cast<int>(optim::StateNames(SetOf(group).optimizer).size()) ==
               plan().decisions.optimizer_states;
  }
  return false;
}

// Of its first element.
const UpdateTable::Set& Executor::SetOf(const sharding::SubGroup& group) const {
  const std::span<const UpdateTable::Part> parts = update_table_.parts(group.unit);
  const auto part = std::find_if(parts.begin(), parts.end(), [&](const UpdateTable::Part& each) {
    return group.begin < each.end;
  });
  const UpdateTable::Runs in = update_table_.RunsIn(*part, group.begin, group.begin + 1);
  const optim::UpdateRun& run = update_table_.runs()[static_cast<size_t>(in.first)];
  return update_table_.sets()[static_cast<size_t>(run.set)];
}

// What follows an update carries its parameters home, also of one that did not happen: they are what
// the master says. Those that updates read are in their slot already, and others are home.
void Executor::KeepParameters(const sharding::UpdateWork& work, Stream& stream) {
  const sharding::Decisions& decisions = plan().decisions;
  const sharding::SubGroup& group =
      plan().pools.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  // The parameters below, and what is written back, are what was read.
  if (swap_verifier_->Verifies(group) && !errors_.has_failed() &&
      !swap_verifier_->AgreeStates(group, swap_verifier_->SumStates(work, stream.team())))
    return;
  if (!work.passes_slot || decisions.reads_parameters()) return;
  KernelsOf(stream).Cast(stream, storage_->At(work.master), DType::kFloat32,
                         storage_->At(work.parameter), decisions.compute, group.count(),
                         optim::Rounding::kParameter);
}

absl::Status Executor::RunOwnOptimizer(const sharding::UpdateWork& work, const StepScalars& scalars,
                                       Stream& stream) {
  optim::Kernels& kernels = KernelsOf(stream);
  const sharding::Decisions& decisions = plan().decisions;
  const sharding::Section& section = plan().layout.units[work.unit].trainable;
  const sharding::SubGroup& group =
      plan().pools.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  const int64_t begin = (decisions.stage == 0 ? 0 : shard_ * section.shard) + group.begin;
  const Tier here = group.tier == Tier::kDevice ? Tier::kDevice : Tier::kCpu;
  float* const gradient = storage_->GradientStaging(here);
  std::byte* const master = storage_->At(work.master);
  std::byte* const parameter = work.writes_parameter ? storage_->At(work.parameter) : nullptr;
  std::vector<std::span<float>> states(static_cast<size_t>(decisions.optimizer_states));
  for (const sharding::Interval& interval :
       sharding::IntervalsIn(section, begin, begin + group.count())) {
    const ParameterSpec& spec = model_[interval.parameter];
    const int64_t count = interval.end - interval.begin, at = interval.offset;
    const DType dtype = decisions.shard_dtype(work.unit);
    kernels.Scale(stream, storage_->At(work.gradient) + at * SizeOf(dtype), dtype,
                  scalars.gradient_factor, gradient, count);
    for (int k = 0; k < decisions.optimizer_states; ++k) {
      states[k] = {
          reinterpret_cast<float*>(storage_->At(work.states.Plus(k * work.states_stride))) + at,
          static_cast<size_t>(count)};
    }
    float* const values = decisions.reads_parameters() ? storage_->MasterStaging(here)
                                                       : reinterpret_cast<float*>(master) + at;
    optim::MasterArrays kept;
    if (decisions.reads_parameters()) {
      kept = {.master = values,
              .parameter = reinterpret_cast<BFloat16*>(parameter) + at,
              .low = decisions.split_master ? reinterpret_cast<uint16_t*>(master) + at : nullptr,
              .count = count,
              .rounding = RoundingOf(work.unit, group.begin + at),
              .step = scalars.step};
      kernels.LoadMaster(stream, kept);
    }
    const auto options = config_.ebb.parameter_groups.find(spec.group);
    const double rate = step_constants_->LearningRateOf(
        options == config_.ebb.parameter_groups.end() ? nullptr : &options->second, scalars);
    const UpdateSlice slice{.slice = {.parameter = interval.parameter,
                                      .name = spec.name,
                                      .shape = spec.shape,
                                      .begin = interval.begin,
                                      .end = interval.end},
                            .group = spec.group,
                            .step = scalars.step,
                            .learning_rate = rate,
                            .master = {values, static_cast<size_t>(count)},
                            .gradient = {gradient, static_cast<size_t>(count)},
                            .states = states,
                            .stream = kernels.enqueues() ? stream.view() : StreamView()};
    if (absl::Status status = options_.optimizer->update(slice); !status.ok()) return status;
    if (decisions.reads_parameters()) kernels.StoreMaster(stream, kept);
  }
  if (parameter != nullptr && !decisions.reads_parameters()) {
    kernels.Cast(stream, master, DType::kFloat32, parameter, decisions.compute, group.count(),
                 optim::Rounding::kParameter);
  }
  return absl::OkStatus();
}

}  // namespace ebb
