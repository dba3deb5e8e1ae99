#include "ebb/runtime/engine/state/state_access.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/optim/cast.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/runtime/engine/updates/update_table.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/split.h"

namespace ebb {

OptimizerStateNames::OptimizerStateNames(const ModelSpec& model, const Config& config,
                                         const OptimizerSpec* own) {
  for (const ParameterSpec& parameter : model.parameters) {
    const auto [group, is_new] = by_group_.try_emplace(parameter.group);
    if (!is_new) continue;
    if (own != nullptr) {
      group->second = own->states;
    } else {
      for (std::string_view name : optim::StateNames(OptimizerOf(config, parameter.group)))
        group->second.emplace_back(name);
    }
    for (const std::string& name : group->second) {
      if (std::find(all_.begin(), all_.end(), name) == all_.end()) all_.push_back(name);
    }
  }
}

absl::StatusOr<int> OptimizerStateNames::IndexOf(const std::string& group,
                                                 std::string_view name) const {
  if (std::find(all_.begin(), all_.end(), name) == all_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the optimizer has no state '", std::string(name), "'; it has ",
                     all_.empty() ? "none" : absl::StrJoin(all_, ", ")));
  }
  const std::vector<std::string>& names = by_group_.at(group);
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? -1 : static_cast<int>(found - names.begin());
}

StateAccess::StateAccess(const Core& core, const OptimizerStateNames& names, Issuer& issuer,
                         SwapVerifier& verifier)
    : core_(core),
      names_(names),
      initial_{core.inputs},
      lane_(core.communicators.Control(core.streams.reduce())),
      values_(core, issuer, verifier, {.team = &core.streams.compute().team()}) {}

namespace {

// The values of a slice, of which the first is values[local].
template <class Value>
std::span<Value> PartOf(std::span<Value> values, const Slice& slice, int64_t local) {
  return values.subspan(static_cast<size_t>(local), static_cast<size_t>(slice.end - slice.begin));
}
std::span<const float> PartOf(const std::vector<float>& values, const Slice& slice, int64_t local) {
  return PartOf(std::span(values), slice, local);
}

}  // namespace

using sharding::SliceOf;
using sharding::StateArray;
using sharding::StateRange;

absl::StatusOr<bool> StateAccess::Has(ParameterId p, What what) const {
  if (what.of == StateClass::kMaster || what.of == StateClass::kParameter) return true;
  if (what.of != StateClass::kOptimizer) return model()[p].trainable;
  EBB_ASSIGN_OR_RETURN(const int index, names_.IndexOf(model()[p].group, what.state));
  return model()[p].trainable && index >= 0;
}

absl::StatusOr<StateAccess::Found> StateAccess::Find(ParameterId p, What what) const {
  const sharding::ParameterLocation& location = plan().layout.parameters[static_cast<size_t>(p)];
  Found found{.array = {.what = what.of, .unit = location.unit, .trainable = location.trainable}};
  switch (what.of) {
    case StateClass::kMaster:
      if (!location.trainable) found.array.what = StateClass::kParameter;
      break;
    case StateClass::kParameter:
      break;
    case StateClass::kGradient:
      if (!location.trainable) return found;
      break;
    case StateClass::kOptimizer: {
      EBB_ASSIGN_OR_RETURN(const int index, names_.IndexOf(model()[p].group, what.state));
      if (!location.trainable || index < 0) return found;
      found.array.state = index;
      break;
    }
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "state of class '", std::string(Name(what.of)),
          "' cannot be read or written; parameter, master, gradient and optimizer can"));
  }
  const sharding::Section& section = sharding::SectionOf(plan(), location.unit, location.trainable);
  for (const sharding::Interval& interval : sharding::IntervalsOf(section, core_.slice)) {
    if (interval.parameter != p) continue;
    found.begin = interval.begin;
    found.end = interval.end;
    found.offset = interval.offset;
  }
  return found;
}

absl::StatusOr<std::vector<StateAccess::Piece>> StateAccess::PiecesOf(std::optional<ParameterId> p,
                                                                      What what) const {
  std::vector<Piece> pieces;
  const auto add = [&](ParameterId one) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Found found, Find(one, what));
    for (int64_t begin = found.begin; begin < found.end; begin += sharding::kRunElements) {
      const int64_t end = std::min(found.end, begin + sharding::kRunElements);
      pieces.push_back(
          {.slice = SliceOf(model(), one, begin, end), .range = found.Range(begin, end)});
    }
    return absl::OkStatus();
  };
  if (p) {
    EBB_RETURN_IF_ERROR(add(*p));
    return pieces;
  }
  for (size_t i = 0; i < model().parameters.size(); ++i)
    EBB_RETURN_IF_ERROR(add(ParameterId{static_cast<int32_t>(i)}));
  return pieces;
}

absl::Status StateAccess::Read(std::optional<ParameterId> p, What what, float scale, Sink sink) {
  EBB_ASSIGN_OR_RETURN(const std::vector<Piece> pieces, PiecesOf(p, what));
  std::vector<float> values;
  std::optional<StateArray> verified;
  const auto read = [&](size_t i) -> absl::Status {
    const auto& [slice, range] = pieces[i];
    if (verified != range.array) EBB_RETURN_IF_ERROR(values_.Verify({.array = range.array}));
    verified = range.array;
    values.resize(static_cast<size_t>(range.count()));
    const bool goes_on = i + 1 < pieces.size() && pieces[i + 1].range.array == range.array;
    EBB_RETURN_IF_ERROR(values_.Read(range, values, goes_on ? &pieces[i + 1].range : nullptr));
    if (scale != 1)
      for (float& value : values) value *= scale;
    return ForEachSlice(model(), slice.parameter, slice.begin, slice.end,
                        [&](const Slice& whole, int64_t local) {
                          return sink(whole, PartOf(values, whole, local));
                        });
  };
  absl::Status status;
  for (size_t i = 0; i < pieces.size() && status.ok(); ++i) status = read(i);
  status.Update(values_.Await());
  return status;
}

void StateAccess::NoteWrite(StateClass what) {
  const bool parameters = what == StateClass::kParameter;
  written_.parameters |= parameters;
  written_.masters |= parameters || what == StateClass::kMaster;
  written_.states |= what == StateClass::kOptimizer;
}

// A parameter and its master become one value, the parameter's. Another master would replace the
// parameter after a skipped step, or not, depending on the tier.
absl::Status StateAccess::WriteParameters(const StateRange& range, std::span<float> values) {
  const int unit = range.array.unit;
  if (!range.array.trainable || !sharding::HasMasters(plan(), unit))
    return values_.Write(range, values);
  if (const DType compute = sharding::ParameterDType(plan(), unit); compute != DType::kFloat32) {
    std::vector<std::byte> rounded(values.size() * static_cast<size_t>(SizeOf(compute)));
    optim::Cast(values_.team(), values.data(), DType::kFloat32, rounded.data(), compute,
                std::ssize(values), optim::Rounding::kParameter);
    optim::Cast(values_.team(), rounded.data(), compute, values.data(), DType::kFloat32,
                std::ssize(values), optim::Rounding::kNearest);
  }
  StateRange masters = range;
  masters.array.what = StateClass::kMaster;
  EBB_RETURN_IF_ERROR(values_.Write(masters, values));
  return sharding::CopiesMasters(plan(), unit) ? values_.Write(range, values) : absl::OkStatus();
}

// `slice`: what this rank has. What is behind a block becomes 0.
absl::Status StateAccess::Ask(const Initialiser& source, const Slice& slice,
                              std::span<float> values) const {
  int64_t filled = 0;
  EBB_RETURN_IF_ERROR(ForEachSlice(model(), slice.parameter, slice.begin, slice.end,
                                   [&](const Slice& whole, int64_t local) {
                                     filled = local + whole.end - whole.begin;
                                     return source(whole, PartOf(values, whole, local));
                                   }));
  std::fill(values.begin() + filled, values.end(), 0.0f);
  return absl::OkStatus();
}

absl::Status StateAccess::Write(std::optional<ParameterId> p, What what, float scale,
                                const Initialiser& source) {
  EBB_ASSIGN_OR_RETURN(const std::vector<Piece> pieces, PiecesOf(p, what));
  std::vector<float> values;
  const auto write = [&](const Slice& slice, const StateRange& range) -> absl::Status {
    // Parameters are rounded on their way.
    float* const in_place =
        scale == 1 && what.of != StateClass::kParameter ? values_.InPlace(range) : nullptr;
    if (in_place != nullptr) {
      const std::span<float> own(in_place, static_cast<size_t>(range.count()));
      EBB_RETURN_IF_ERROR(Ask(source, slice, own));
      return CastMasters(range, own);
    }
    values.resize(static_cast<size_t>(range.count()));
    EBB_RETURN_IF_ERROR(Ask(source, slice, values));
    EBB_RETURN_IF_ERROR(CheckBytes(model()[slice.parameter], values));
    if (scale != 1)
      for (float& value : values) value /= scale;
    if (what.of == StateClass::kParameter) return WriteParameters(range, values);
    EBB_RETURN_IF_ERROR(values_.Write(range, values));
    return CastMasters(range, values);
  };
  absl::Status status;
  for (const auto& [slice, range] : pieces) {
    // Cut where sub-groups end, so that each part lies together and can be written in place.
    for (const sharding::StateRun& run : sharding::RunsOf(plan(), core_.slice, range)) {
      const int64_t begin = slice.begin + run.begin - range.begin;
      if (status.ok())
        status = write(SliceOf(model(), slice.parameter, begin, begin + run.count()),
                       {range.array, run.begin, run.end});
    }
  }
  status.Update(values_.Await());
  return status;
}

void StateAccess::GatherUnit(int unit) {
  absl::Status uploaded;
  for (const bool trainable : {true, false}) {
    if (plan().decisions.parameter_tier == Tier::kDevice || !uploaded.ok()) break;
    const StateRange slice{
        .array = {.what = StateClass::kParameter, .unit = unit, .trainable = trainable},
        .end = sharding::SectionOf(plan(), unit, trainable).shard};
    uploaded = values_.Verify(slice);
    if (uploaded.ok()) uploaded = values_.Upload(slice);
  }
  uploaded.Update(values_.Await());
  uploaded.Update(values_.Leave(sharding::LowerGather(plan(), unit)));
  core_.errors.Fail(uploaded);
}

absl::Status StateAccess::CastMasters(StateRange range, std::span<const float> masters) {
  if (range.array.what != StateClass::kMaster || !sharding::CopiesMasters(plan(), range.array.unit))
    return absl::OkStatus();
  range.array.what = StateClass::kParameter;
  return values_.Write(range, masters);
}

absl::Status StateAccess::Spread(const sharding::SpreadClasses& classes) {
  for (int unit = 0; unit < std::ssize(model().units); ++unit) {
    EBB_RETURN_IF_ERROR(values_.Run(sharding::LowerSpread(plan(), unit, classes)));
    EBB_RETURN_IF_ERROR(core_.communicators.gather().status());
  }
  return absl::OkStatus();
}

absl::Status StateAccess::FillSlices() {
  if (!core_.inputs.options.initial_values_of_rank_0) return initial_.Fill(values_);
  return initial_.FillAsRank0(
      values_, /*is_rank_0=*/core_.inputs.of_calls().rank() == 0,
      [this](std::span<float> values) { return Pass(values, /*from=*/0, /*to=*/-1); });
}

absl::Status StateAccess::SpreadFilled() {
  return Spread({.masters = true, .parameters = true, .states = initial_.OfStates()});
}

absl::Status StateAccess::SpreadWritten() {
  const sharding::SpreadClasses written = std::exchange(written_, {});
  core_.errors.Fail(values_.Await());  // of this rank; the exchange spreads it to all ranks
  return Spread(written);
}

}  // namespace ebb
