#include "ebb/runtime/engine/updates/update_call.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ebb/optim/update_runs.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/kernels_by_stream.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/sharding/norm_records.h"

namespace ebb {

using sharding::Code;
using sharding::Op;
using sharding::Operand;

namespace {

enum { kGradient, kMaster, kParameter, kStates };  // operands

}  // namespace

UpdateCall::Work UpdateCall::WorkOf(const LinkedList& run, int index, const StepTag& step) const {
  const Op& op = run[index];
  const sharding::UpdateDetail& detail = op.updates.front();
  Work of{.detail = detail,
          .unit = op.parts.front().unit,
          .parity = op.carried() ? 1 - step.parity : step.parity,
          .arrays = {.gradient = run.At(index, kGradient),
                     .gradient_dtype = op.operands[kGradient].encoding.dtype,
                     .parameter = run.At(index, kParameter),
                     .parameter_dtype = op.operands[kParameter].encoding.dtype,
                     .count = detail.count()},
          .master = run.At(index, kMaster),
          .states = run.AllFrom(index, kStates).first(static_cast<size_t>(detail.states)),
          .is_momentum = op.role == sharding::Role::kMomentum};
  const Operand& master = op.operands[kMaster];
  of.arrays.rounding = {detail.rounding_unit, detail.begin + core_.slice * detail.per_slice};
  of.arrays.round_states_stochastically = core_.inputs.config.ebb.stochastic_rounding;
  const bool keeps_master = master.access != sharding::Access::kNone;  // else the parameter is it
  if (keeps_master && master.encoding == kLowHalves) {
    of.arrays.master_low = reinterpret_cast<uint16_t*>(of.master);
  } else if (keeps_master) {
    of.arrays.master = reinterpret_cast<float*>(of.master);
  }
  // An optimizer of the trainer's may have more.
  for (size_t k = 0; k < std::min<size_t>(of.states.size(), optim::kStatesMax); ++k) {
    of.arrays.states[k] =
        optim::PieceAt(of.states[k], op.operands[kStates + k].encoding, detail.count());
  }
  return of;
}

void UpdateCall::Run(const LinkedList& run, int index, const StepTag& step, Stream& stream) const {
  if (run[index].role == sharding::Role::kOrthogonalise) return Orthogonalise(run, index, stream);
  const Work of = WorkOf(run, index, step);
  if (run[index].code() == Code::kUpdate) return Update(run, index, of, stream);
  const int sums = kStates + of.detail.states;
  const auto all = static_cast<size_t>(run[index].operands[static_cast<size_t>(sums)].count /
                                       sharding::kNormSumsBytes);
  SumNorms(of, {reinterpret_cast<optim::NormSums*>(run.At(index, sums)), all},
           run[index].parts.front().first, stream);
}

// A late update belongs to a step that all ranks agreed on. An error in the next step, which may
// already run, does not stop it. An early update uses the errors that are known by now, which cover
// every collective before it. Kernels that enqueue themselves are enqueued before the errors are
// known, and read them when they run. An optimizer of the trainer's is called only when the host
// knows them.
void UpdateCall::Update(const LinkedList& run, int index, const Work& of, Stream& stream) const {
  const StepScalars& scalars = constants_.of(of.parity, of.detail.early);
  optim::Kernels& kernels = core_.kernels.Of(stream);
  const bool known = !core_.kernels.Enqueue(stream) || own_enqueues_;
  if ((known && !scalars.apply) || !outcome_.MayUpdate(of.parity, of.detail.early) ||
      (own_enqueues_ && !core_.inputs.device.status().ok()))
    return Keep(of, stream);
  if (!known) Keep(of, stream);  // for an update that then writes nothing
  const int sub_group = of.detail.sub_group;
  const bool verifies = verifier_.Verifies(sub_group);
  const bool in_fp32 =
      std::all_of(of.arrays.states, of.arrays.states + optim::kStatesMax,
                  [](const optim::StateArray& state) { return state.encoding == DType::kFloat32; });
  const UpdateTable::Set* const only =
      own_ == nullptr && in_fp32 && !run.plan().decisions.has_matrices(of.unit)
          ? table_.OnlySetOf(of.unit, of.detail.begin, of.detail.end, of.detail.states)
          : nullptr;
  if (verifies && only != nullptr) {
    // A rank that disagrees fails its engine, and the values just written are not used.
    const optim::UpdateChecksums sums =
        optim::UpdateAndSum(stream.team(), constants_.OptimizerOf(*only, scalars), of.arrays,
                            constants_.ScalarsOf(*only, scalars), verifier_.scratch());
    const auto arrays = static_cast<size_t>(1 + of.detail.states);
    if (Agrees(of, std::span(sums.read).first(arrays)))
      verifier_.SetStates(sub_group, 0, std::span(sums.written).first(arrays));
    return;
  }
  if (verifies && !Agrees(of, Checksums(of, stream))) return;
  if (own_ != nullptr) {
    const int staging = kStates + of.detail.states + 1;  // behind the constants
    const bool has_master = staging + 1 < std::ssize(run[index].operands);
    const absl::Status status = own_->Update(
        {.sub_group = sub_group,
         .arrays = of.arrays,
         .states = of.states,
         .gradient = reinterpret_cast<float*>(run.At(index, staging)),
         .master = has_master ? reinterpret_cast<float*>(run.At(index, staging + 1)) : nullptr},
        constants_, scalars, kernels, stream);
    if (!status.ok()) {
      core_.errors.Fail(absl::Status(
          status.code(), absl::StrCat("the engine has failed: its optimizer, in unit '",
                                      std::string(run.unit_name(index)), "': ", status.message())));
    }
  } else {
    ForEachPart(of, stream, [&](const Part& part) {
      kernels.Update(stream, of.is_momentum ? optim::UpdateRule::kMuonMomentum : part.rule,
                     part.arrays, part.runs);
    });
  }
  if (verifies) verifier_.SetStates(sub_group, FirstArray(of), Checksums(of, stream));
}

// The operations behind an update carry its parameters to their place, even if the update did not
// happen. Parameters are then the cast of the master. Parameters that updates read are in their
// slot already, and others are in their place.
void UpdateCall::Keep(const Work& of, Stream& stream) const {
  // The parameters below, and the bytes that are written back, are unchanged.
  if (verifier_.Verifies(of.detail.sub_group) && !core_.errors.has_failed() &&
      !Agrees(of, Checksums(of, stream)))
    return;
  if (!of.detail.keeps_parameter) return;
  core_.kernels.Of(stream).Cast(stream, of.arrays.master, DType::kFloat32, of.arrays.parameter,
                                of.arrays.parameter_dtype, of.arrays.count,
                                optim::Rounding::kParameter);
}

// Whether the step is applied or not: where it is not, no update uses the result.
void UpdateCall::Orthogonalise(const LinkedList& run, int index, Stream& stream) const {
  enum { kMatrices, kScratch };
  const sharding::Decisions& d = run.plan().decisions;
  const int unit = run[index].parts.front().unit;
  for (const sharding::OwnedMatrix& matrix : d.matrices[unit]) {
    if (d.exchanges_matrices() && matrix.owner != core_.slice) continue;
    const OptimizerConfig muon =
        OptimizerOf(core_.inputs.config, core_.inputs.model[matrix.parameter].group);
    core_.kernels.Of(stream).Orthogonalise(
        stream, optim::NewtonSchulzOf(muon, matrix.rows, matrix.columns),
        {.matrix = run.At(index, kMatrices) + matrix.at * SizeOf(d.direction),
         .rows = matrix.rows,
         .columns = matrix.columns,
         .dtype = d.direction,
         .scratch = run.At(index, kScratch)});
  }
}

// Nothing is written but the sums. A rank that cannot take them says so with its record, and no
// rank updates anything.
void UpdateCall::SumNorms(const Work& of, std::span<optim::NormSums> sums, bool first,
                          Stream& stream) const {
  if (first) core_.kernels.Of(stream).ClearNorms(stream, sums);
  const bool known = !core_.kernels.Enqueue(stream);
  if ((known && !constants_.of(of.parity, /*early=*/false).apply) || core_.errors.has_failed())
    return;
  if (verifier_.Verifies(of.detail.sub_group) && !Agrees(of, Checksums(of, stream))) return;
  ForEachPart(of, stream, [&](const Part& part) {
    if (!optim::TakesNorms(part.rule)) return;
    core_.kernels.Of(stream).SumNorms(stream, part.rule, part.arrays, part.runs,
                                      sums.subspan(static_cast<size_t>(part.first_set)));
  });
}

void UpdateCall::ForEachPart(const Work& of, const Stream& stream,
                             absl::FunctionRef<void(const Part&)> visit) const {
  const bool on_device = core_.kernels.Enqueue(stream);
  const auto constants = control_.constants_for(on_device, of.parity, of.detail.early);
  const auto runs = control_.runs_for(on_device);
  for (const UpdateTable::Part& part : table_.parts(of.unit)) {
    const int64_t first = std::max(part.begin, of.detail.begin),
                  last = std::min(part.end, of.detail.end);
    if (first >= last) continue;
    const UpdateTable::Runs in = table_.RunsIn(part, first, last);
    Part some{
        .rule = part.rule,
        .arrays = optim::PartOf(of.arrays, first - of.detail.begin, last - first),
        .runs = {.constants = constants,
                 .runs = runs.subspan(static_cast<size_t>(in.first), static_cast<size_t>(in.count)),
                 .begin = first}};
    if (in.count == 1) {
      some.first_set = table_.runs()[static_cast<size_t>(in.first)].set;
      some.runs = {.constants = constants.subspan(static_cast<size_t>(some.first_set), 1)};
    }
    visit(some);
  }
}

std::span<const uint64_t> UpdateCall::Checksums(const Work& of, Stream& stream) const {
  std::byte* arrays[1 + optim::kStatesMax] = {of.master};
  std::copy(of.states.begin(), of.states.end(), arrays + 1);
  const std::span<std::byte* const> all(arrays, 1 + of.states.size());
  const int first = FirstArray(of);
  return verifier_.SumStates(of.detail.sub_group, first, all.subspan(static_cast<size_t>(first)),
                             stream.team());
}

bool UpdateCall::Agrees(const Work& of, std::span<const uint64_t> checksums) const {
  return verifier_.AgreeStates(of.detail.sub_group, FirstArray(of), checksums);
}

}  // namespace ebb
