#include "ebb/runtime/engine/update_call.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/interval.h"

namespace ebb {

using sharding::Code;
using sharding::Instruction;

void UpdateCall::Run(const LinkedFragment& run, int index, const StepTag& step,
                     Stream& stream) const {
  enum Operand { kGradient, kMaster, kParameter, kStates };
  const Instruction& instruction = run[index];
  const sharding::Part& part = instruction.parts.front();
  const sharding::UpdateWork& work = run.plan().works[static_cast<size_t>(part.work)];
  const bool early =
      run.plan().decisions.timing == sharding::UpdateTiming::kEarly && !instruction.carried;
  const bool norms = instruction.code == Code::kParameterNorms;
  const int count = norms ? decisions().norm_states[static_cast<size_t>(work.unit)]
                          : decisions().optimizer_states;
  const std::span<std::byte* const> states =
      run.AllFrom(index, kStates).first(static_cast<size_t>(count));
  const Arrays of{.group = &with_.plan->pools.homes.sub_groups[static_cast<size_t>(work.sub_group)],
                  .parity = instruction.carried ? 1 - step.parity : step.parity,
                  .early = early,
                  .passes_slot = work.passes_slot,
                  .gradient = run.At(index, kGradient),
                  .master = run.At(index, kMaster),
                  .parameter = run.At(index, kParameter),
                  .states = states};
  if (!norms) return Update(of, stream);
  const int sums = kStates + count;
  const auto all = static_cast<size_t>(instruction.operands[static_cast<size_t>(sums)].count /
                                       sharding::kNormSumsBytes);
  SumNorms(of, {reinterpret_cast<optim::NormSums*>(run.At(index, sums)), all}, part.first, stream);
}

// A late update belongs to a step that all ranks agreed on: what goes wrong in the next one, which may already
// run, does not stop it. An early one has only what is known by now, which includes every collective that it comes
// after. Where kernels enqueue themselves both are enqueued before that is known, and look when they run, unless an
// optimizer of the trainer's enqueues them: the host has waited then for what decides.
void UpdateCall::Update(const Arrays& of, Stream& stream) const {
  const StepScalars& scalars = with_.constants->of(of.parity, of.early);
  const bool known = !KernelsOf(stream).enqueues() || with_.own_enqueues;
  if ((known && !scalars.apply) || !with_.outcome->MayUpdate(of.parity, of.early) ||
      (with_.own_enqueues && !with_.device->status().ok()))
    return Keep(of, stream);
  if (!known) Keep(of, stream);  // for an update that then writes nothing
  SwapVerifier& verifier = *with_.verifier;
  const sharding::SubGroup& group = *of.group;
  const bool verifies = verifier.Verifies(group), in_one_pass = UpdatesInOnePass(group);
  if (verifies && !in_one_pass && !verifier.AgreeStates(group, Checksums(of, stream))) return;
  if (with_.own != nullptr) {
    if (absl::Status status = UpdateByOwn(of, scalars, stream); !status.ok()) {
      with_.errors->Fail(absl::Status(
          status.code(), absl::StrCat("the engine has failed: its optimizer, in unit '",
                                      with_.model->units[static_cast<size_t>(group.unit)].name,
                                      "': ", status.message())));
    }
    if (verifies) verifier.SetStates(group, Checksums(of, stream));
    return;
  }
  if (verifies && in_one_pass) {
    // A rank that disagrees fails its engine, and what was just written goes nowhere.
    const UpdateTable::Set& set = SetOf(group);
    const optim::UpdateChecksums sums =
        optim::UpdateAndSum(stream.team(), with_.constants->OptimizerOf(set, scalars), ArraysOf(of),
                            with_.constants->ScalarsOf(set, scalars), verifier.scratch());
    if (verifier.AgreeStates(group, sums.read)) verifier.SetStates(group, sums.written);
    return;
  }
  ForEachPart(of, stream, [&](const Part& part) {
    KernelsOf(stream).Update(stream, part.rule, part.arrays, part.runs);
  });
  if (verifies) verifier.SetStates(group, Checksums(of, stream));
}

// What follows an update carries its parameters home, also of one that did not happen: they are what the master
// says. Those that updates read are in their slot already, and others are home.
void UpdateCall::Keep(const Arrays& of, Stream& stream) const {
  // The parameters below, and what is written back, are what was read.
  if (with_.verifier->Verifies(*of.group) && !with_.errors->has_failed() &&
      !with_.verifier->AgreeStates(*of.group, Checksums(of, stream)))
    return;
  if (!of.passes_slot || decisions().reads_parameters()) return;
  KernelsOf(stream).Cast(stream, of.master, DType::kFloat32, of.parameter, decisions().compute,
                         of.group->count(), optim::Rounding::kParameter);
}

// Nothing is written but the sums. A rank that cannot take them says so with its record, and no rank updates
// anything.
void UpdateCall::SumNorms(const Arrays& of, std::span<optim::NormSums> sums, bool first,
                          Stream& stream) const {
  if (first) KernelsOf(stream).ClearNorms(stream, sums);
  const bool known = !KernelsOf(stream).enqueues();
  if ((known && !with_.constants->of(of.parity, /*early=*/false).apply) ||
      with_.errors->has_failed())
    return;
  const int states = static_cast<int>(of.states.size());
  if (with_.verifier->Verifies(*of.group) &&
      !with_.verifier->AgreeStates(*of.group, Checksums(of, stream, states), states))
    return;
  ForEachPart(of, stream, [&](const Part& part) {
    if (!optim::TakesNorms(part.rule)) return;
    KernelsOf(stream).SumNorms(stream, part.rule, part.arrays, part.runs,
                               sums.subspan(static_cast<size_t>(part.first_set)));
  });
}

void UpdateCall::ForEachPart(const Arrays& of, const Stream& stream,
                             absl::FunctionRef<void(const Part&)> visit) const {
  const sharding::SubGroup& group = *of.group;
  const optim::UpdateArrays arrays = ArraysOf(of);
  const bool on_device = KernelsOf(stream).enqueues();
  const auto constants = with_.control->constants_for(on_device, of.parity, of.early);
  const auto runs = with_.control->runs_for(on_device);
  for (const UpdateTable::Part& part : with_.table->parts(group.unit)) {
    const int64_t first = std::max(part.begin, group.begin), last = std::min(part.end, group.end);
    if (first >= last) continue;
    const UpdateTable::Runs in = with_.table->RunsIn(part, first, last);
    Part some{
        .rule = part.rule,
        .arrays = optim::PartOf(arrays, first - group.begin, last - first),
        .runs = {.constants = constants,
                 .runs = runs.subspan(static_cast<size_t>(in.first), static_cast<size_t>(in.count)),
                 .begin = first}};
    if (in.count == 1) {
      some.first_set = with_.table->runs()[static_cast<size_t>(in.first)].set;
      some.runs = {.constants = constants.subspan(static_cast<size_t>(some.first_set), 1)};
    }
    visit(some);
  }
}

// All of the sub-group.
optim::UpdateArrays UpdateCall::ArraysOf(const Arrays& of) const {
  optim::UpdateArrays arrays{.gradient = of.gradient,
                             .gradient_dtype = decisions().shard_dtype(of.group->unit),
                             .parameter = of.parameter,
                             .parameter_dtype = decisions().compute,
                             .count = of.group->count()};
  if (decisions().stochastic_rounding) {
    arrays.rounding = RoundingOf(of.group->unit, of.group->begin);
  } else if (decisions().split_master) {
    arrays.master_low = reinterpret_cast<uint16_t*>(of.master);
  } else {
    arrays.master = reinterpret_cast<float*>(of.master);
  }
  for (size_t k = 0; k < of.states.size(); ++k)
    arrays.states[k] = reinterpret_cast<float*>(of.states[k]);
  return arrays;
}

std::span<const uint64_t> UpdateCall::Checksums(const Arrays& of, Stream& stream,
                                                std::optional<int> states) const {
  return with_.verifier->SumStates(*of.group, of.master, of.states, stream.team(), states);
}

optim::RoundingPlace UpdateCall::RoundingOf(int unit, int64_t at) const {
  const int64_t shard = with_.plan->layout.units[static_cast<size_t>(unit)].trainable.shard;
  const std::string& name = with_.model->units[static_cast<size_t>(unit)].name;
  return {.unit = sharding::Hasher().Add(name).hash(),
          .index = (decisions().stage == 0 ? 0 : with_.shard * shard) + at};
}

// By one optimizer with all states that the sub-group has, so that its pass can take their checksums.
bool UpdateCall::UpdatesInOnePass(const sharding::SubGroup& group) const {
  if (with_.own != nullptr) return false;
  for (const UpdateTable::Part& part : with_.table->parts(group.unit)) {
    if (part.begin > group.begin || part.end < group.end || optim::TakesNorms(part.rule)) continue;
    return with_.table->RunsIn(part, group.begin, group.end).count == 1 &&
           static_cast<int>(optim::StateNames(SetOf(group).optimizer).size()) ==
               decisions().optimizer_states;
  }
  return false;
}

// Of its first element.
const UpdateTable::Set& UpdateCall::SetOf(const sharding::SubGroup& group) const {
  const std::span<const UpdateTable::Part> parts = with_.table->parts(group.unit);
  const auto part = std::find_if(parts.begin(), parts.end(), [&](const UpdateTable::Part& each) {
    return group.begin < each.end;
  });
  const UpdateTable::Runs in = with_.table->RunsIn(*part, group.begin, group.begin + 1);
  const optim::UpdateRun& run = with_.table->runs()[static_cast<size_t>(in.first)];
  return with_.table->sets()[static_cast<size_t>(run.set)];
}

absl::Status UpdateCall::UpdateByOwn(const Arrays& of, const StepScalars& scalars,
                                     Stream& stream) const {
  optim::Kernels& kernels = KernelsOf(stream);
  const sharding::SubGroup& group = *of.group;
  const sharding::Section& section =
      with_.plan->layout.units[static_cast<size_t>(group.unit)].trainable;
  const int64_t begin = (decisions().stage == 0 ? 0 : with_.shard * section.shard) + group.begin;
  const Tier here = group.tier == Tier::kDevice ? Tier::kDevice : Tier::kCpu;
  float* const gradient = with_.storage->GradientStaging(here);
  std::vector<std::span<float>> states(of.states.size());
  for (const sharding::Interval& interval :
       sharding::IntervalsIn(section, begin, begin + group.count())) {
    const ParameterSpec& spec = (*with_.model)[interval.parameter];
    const int64_t count = interval.end - interval.begin, at = interval.offset;
    const DType dtype = decisions().shard_dtype(group.unit);
    kernels.Scale(stream, of.gradient + at * SizeOf(dtype), dtype, scalars.gradient_factor,
                  gradient, count);
    for (size_t k = 0; k < states.size(); ++k)
      states[k] = {reinterpret_cast<float*>(of.states[k]) + at, static_cast<size_t>(count)};
    float* const values = decisions().reads_parameters() ? with_.storage->MasterStaging(here)
                                                         : reinterpret_cast<float*>(of.master) + at;
    optim::MasterArrays kept;
    if (decisions().reads_parameters()) {
      kept = {
          .master = values,
          .parameter = reinterpret_cast<BFloat16*>(of.parameter) + at,
          .low = decisions().split_master ? reinterpret_cast<uint16_t*>(of.master) + at : nullptr,
          .count = count,
          .rounding = RoundingOf(group.unit, group.begin + at),
          .step = scalars.step};
      kernels.LoadMaster(stream, kept);
    }
    const auto options = with_.config->ebb.parameter_groups.find(spec.group);
    const double rate = with_.constants->LearningRateOf(
        options == with_.config->ebb.parameter_groups.end() ? nullptr : &options->second, scalars);
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
    if (absl::Status status = with_.own->update(slice); !status.ok()) return status;
    if (decisions().reads_parameters()) kernels.StoreMaster(stream, kept);
  }
  if (of.parameter != nullptr && !decisions().reads_parameters()) {
    kernels.Cast(stream, of.master, DType::kFloat32, of.parameter, decisions().compute,
                 group.count(), optim::Rounding::kParameter);
  }
  return absl::OkStatus();
}

}  // namespace ebb
