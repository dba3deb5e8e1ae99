#include "ebb/runtime/engine/steps/scope_views.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/scopes.h"

namespace ebb {

using sharding::Section;

void ScopeViews::FollowPlan() {
  boundary_dtypes_.clear();
  boundary_elements_.clear();
  boundary_numbers_.clear();
  const ModelSpec& model = core_.inputs.model;
  const size_t visits = model.forward.size();
  requested_.assign(static_cast<size_t>(sharding::WholeGradients(plan())), {});
  const DType dtype = sharding::BoundaryDType(plan());
  round_numbers_.assign(2, {});
  for (RoundNumbers& numbers : round_numbers_)
    numbers.numbers.resize(static_cast<size_t>(sharding::MicroBatchesOfRound(plan())));
  for (size_t v = 0; v < visits; ++v) {
    const size_t unit = static_cast<size_t>(model.forward[v].unit);
    requested_[static_cast<size_t>(
                   sharding::WholeGradientOf(plan(), static_cast<int>(v), static_cast<int>(unit)))]
        .resize(plan().layout.units[unit].trainable.placements.size());
    const int64_t bytes = model.forward[v].output_bytes, size = SizeOf(dtype);
    boundary_dtypes_.push_back(bytes % size == 0 ? dtype : DType::kInt8);
    boundary_elements_.push_back(bytes % size == 0 ? bytes / size : bytes);
    const int before = sharding::BoundaryBefore(model, static_cast<int>(v));
    boundary_numbers_.push_back(before < 0 ? 0 : boundary_numbers_[before] + 1);
  }
}

void ScopeViews::Begin(bool evaluation, int micro_batches) {
  for (std::vector<uint8_t>& requested : requested_)
    if (!evaluation) std::fill(requested.begin(), requested.end(), uint8_t{0});
  if (!evaluation) return;
  while (static_cast<int>(walk_numbers_.size()) < micro_batches)
    walk_numbers_.push_back(static_cast<int>(walk_numbers_.size()));
}

// Parameters.

const OpenScope* ScopeViews::Find(int64_t id, ParameterId p) const {
  const OpenScope* const scope = Find(id);
  const size_t index = static_cast<size_t>(p);
  if (scope == nullptr || index >= plan().layout.parameters.size()) return scope;
  for (const OpenScope& part : progress_.open)
    if (part.whole == id && part.unit == plan().layout.parameters[index].unit) return &part;
  return scope;
}

// Null: the scope does not hold it, which was said.
const sharding::ParameterLocation* ScopeViews::Locate(std::string_view what, const OpenScope& scope,
                                                      ParameterId p) {
  const std::vector<sharding::ParameterLocation>& parameters = plan().layout.parameters;
  const size_t index = static_cast<size_t>(p);
  if (index < parameters.size() && parameters[index].unit == scope.unit) return &parameters[index];
  Refuse(NotHeld(what, scope, p));
  return nullptr;
}

absl::Status ScopeViews::NotHeld(std::string_view what, const OpenScope& scope,
                                 ParameterId p) const {
  const ModelSpec& model = core_.inputs.model;
  const std::vector<sharding::ParameterLocation>& parameters = plan().layout.parameters;
  const size_t index = static_cast<size_t>(p);
  const std::string of(what);
  const std::string asked =
      absl::StrCat(" asked of ", messages_.ScopeName(scope.kind, scope.unit), ", ");
  if (index >= parameters.size()) {
    return absl::InvalidArgumentError(absl::StrCat(of, "parameter ", static_cast<int>(p), asked,
                                                   "but the model has ", parameters.size(),
                                                   " parameters: the view is empty"));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      of, "parameter '", model.parameters[index].name, "'", asked,
      "which does not hold it: it is of unit '",
      model.units[static_cast<size_t>(parameters[index].unit)].name, "', and the view is empty"));
}

TensorView ScopeViews::ViewOf(ParameterId p, const sharding::ParameterLocation& location) const {
  const size_t index = static_cast<size_t>(p);
  const DType dtype = sharding::ParameterDType(plan(), location.unit);
  return {
      .data = core_.storage.At(sharding::WholePlace(plan(), location.unit, location.trainable)) +
              location.offset * SizeOf(dtype),
      .dtype = dtype,
      .shape = ShownShape(core_.inputs.model.parameters[index]),
      .origin = view_errors_.Of(Shown::kParameter, static_cast<int>(index))};
}

TensorView ScopeViews::Parameter(int64_t id, ParameterId p) {
  const OpenScope* scope = Find(id, p);
  if (scope == nullptr) return {};
  const sharding::ParameterLocation* const location = Locate("", *scope, p);
  return location == nullptr ? TensorView{} : ViewOf(p, *location);
}

std::vector<ParameterView> ScopeViews::Unit(UnitId unit) const {
  const std::vector<UnitSpec>& units = core_.inputs.model.units;
  const size_t index = static_cast<size_t>(unit);
  if (index >= units.size()) return {};
  std::vector<ParameterView> views;
  for (const ParameterId p : WithParts(core_.inputs.model, unit)) {
    const sharding::ParameterLocation& location = plan().layout.parameters[static_cast<size_t>(p)];
    ParameterView& view = views.emplace_back(ParameterView{p, ViewOf(p, location), std::nullopt});
    if (location.trainable) view.gradient = sharding::GradientDType(plan(), location.unit);
  }
  return views;
}

MutableTensorView ScopeViews::Workspace() const {
  const ModelSpec& model = core_.inputs.model;
  return {.data = core_.storage.Pool(StateClass::kWorkspace).data(),
          .dtype = DType::kInt8,
          .shape = {&model.workspace_bytes, 1},
          .origin = view_errors_.Of(Shown::kWorkspace)};
}

// Gradients.

std::vector<uint8_t>& ScopeViews::RequestedOf(const OpenScope& scope) {
  return requested_[static_cast<size_t>(
      sharding::WholeGradientOf(plan(), scope.visit, scope.unit))];
}

bool ScopeViews::TakesGradients(const OpenScope& scope) const {
  return scope.planned >= 0
             ? progress_.PlannedScopeOf(scope.planned).gradients
             : core_.inputs.model.forward[static_cast<size_t>(scope.visit)].gradients;
}

BackwardScope::Fused ScopeViews::Gradient(int64_t id, ParameterId p, bool zero_fill) {
  const OpenScope* scope = Find(id, p);
  if (scope == nullptr) return {};
  const sharding::ParameterLocation* const location = Locate("the gradient of ", *scope, p);
  if (location == nullptr) return {};
  const size_t index = static_cast<size_t>(p);
  const ModelSpec& model = core_.inputs.model;
  if (!location->trainable) {
    Refuse(absl::InvalidArgumentError(absl::StrCat("the gradient of parameter '",
                                                   model.parameters[index].name,
                                                   "', which is frozen (trainable = false)")));
    return {};
  }
  if (!TakesGradients(*scope)) {
    Refuse(absl::InvalidArgumentError(
        absl::StrCat("the gradient of parameter '", model.parameters[index].name, "' in ",
                     messages_.ScopeName(scope->kind, scope->unit), ", visit ", scope->visit,
                     " of forward, which takes no gradients (Visit::gradients is false)")));
    return {};
  }
  const Section& section = plan().layout.units[static_cast<size_t>(scope->unit)].trainable;
  const auto placement = std::find_if(
      section.placements.begin(), section.placements.end(),
      [&](const sharding::PlacedParameter& candidate) { return candidate.parameter == p; });
  uint8_t& requested =
      RequestedOf(*scope)[static_cast<size_t>(placement - section.placements.begin())];
  const DType dtype = sharding::GradientDType(plan(), scope->unit);
  std::byte* const data =
      core_.storage.At(sharding::WholeGradientPlace(plan(), scope->visit, scope->unit)) +
      location->offset * SizeOf(dtype);
  const bool first = requested == 0;
  requested = 1;
  if (first && zero_fill) core_.streams.compute().Zero(data, location->elements * SizeOf(dtype));
  return {.tensor = {.data = data,
                     .dtype = dtype,
                     .shape = ShownShape(model.parameters[index]),
                     .origin = view_errors_.Of(Shown::kGradient, static_cast<int>(index))},
          .beta = first ? 0.0f : 1.0f};
}

void ScopeViews::Gradients(int64_t id, std::span<const ParameterId> of, size_t room, bool zero_fill,
                           absl::FunctionRef<void(size_t, const BackwardScope::Fused&)> show) {
  if (room != of.size()) {
    return Refuse(absl::InvalidArgumentError(
        absl::StrCat("the gradients of ", of.size(), " parameters were asked for, with ", room,
                     " views to hold them; give a view for each")));
  }
  std::byte *begin = nullptr, *end = nullptr;  // to be zeroed
  for (size_t i = 0; i < of.size(); ++i) {
    const BackwardScope::Fused gradient = Gradient(id, of[i], /*zero_fill=*/false);
    show(i, gradient);
    if (!zero_fill || gradient.tensor.data == nullptr || gradient.beta != 0) continue;
    auto* const first = static_cast<std::byte*>(gradient.tensor.data);
    const int64_t size = SizeOf(gradient.tensor.dtype);
    // A gap shorter than the alignment is padding, and no other parameter.
    const bool is_neighbour =
        begin != nullptr && first >= end && first - end < sharding::kAlignment * size;
    if (!is_neighbour) {
      if (begin != nullptr) core_.streams.compute().Zero(begin, end - begin);
      begin = first;
    }
    end = first + gradient.tensor.size() * size;
  }
  if (begin != nullptr) core_.streams.compute().Zero(begin, end - begin);
}

void ScopeViews::CompleteGradient(const OpenScope& scope) {
  const Section& section = plan().layout.units[static_cast<size_t>(scope.unit)].trainable;
  const int64_t size = SizeOf(sharding::GradientDType(plan(), scope.unit));
  std::byte* const whole =
      core_.storage.At(sharding::WholeGradientPlace(plan(), scope.visit, scope.unit));
  std::vector<uint8_t>& requested = RequestedOf(scope);
  int64_t end = 0;
  for (size_t p = 0; p < section.placements.size(); ++p) {
    const sharding::PlacedParameter& placement = section.placements[p];
    if (!requested[p]) continue;
    if (placement.offset > end)
      core_.streams.compute().Zero(whole + end * size, (placement.offset - end) * size);
    end = placement.offset + placement.elements;
    requested[p] = 0;
  }
  if (section.elements > end)
    core_.streams.compute().Zero(whole + end * size, (section.elements - end) * size);
}

// Boundaries.

std::span<const int> ScopeViews::MicroBatches(int64_t id) {
  const OpenScope* scope = Find(id);
  if (scope == nullptr) return {};
  if (progress_.evaluation)
    return std::span(walk_numbers_).first(static_cast<size_t>(progress_.micro_batches));
  RoundNumbers* of_round = nullptr;
  for (RoundNumbers& known : round_numbers_) {
    if (known.round == scope->round) return known.numbers;
    const bool is_shown =
        std::any_of(progress_.open.begin(), progress_.open.end(),
                    [&](const OpenScope& open) { return open.round == known.round; });
    if (!is_shown) of_round = &known;
  }
  if (of_round == nullptr) {
    of_round = &round_numbers_.emplace_back();
    of_round->numbers.resize(static_cast<size_t>(sharding::MicroBatchesOfRound(plan())));
  }
  of_round->round = scope->round;
  std::iota(of_round->numbers.begin(), of_round->numbers.end(),
            scope->round * static_cast<int>(of_round->numbers.size()));
  return of_round->numbers;
}

// The output of visit `visit`, or its gradient.
MutableTensorView ScopeViews::Boundary(int64_t id, int micro_batch, int visit, bool gradient,
                                       Shown shown) {
  const OpenScope* scope = Find(id);
  const ModelSpec& model = core_.inputs.model;
  if (scope == nullptr || visit < 0 || !sharding::HandsOn(model, visit) ||
      model.forward[static_cast<size_t>(visit)].output_bytes == 0)
    return {};
  const std::span<const int> served = MicroBatches(id);
  if (std::find(served.begin(), served.end(), micro_batch) == served.end()) {
    Refuse(absl::InvalidArgumentError(absl::StrCat(
        "micro-batch ", micro_batch, " asked of ", messages_.ScopeName(scope->kind, scope->unit),
        ", which serves ", served.front(), " to ", served.back())));
    return {};
  }
  const int index = micro_batch - served.front();
  const sharding::Place place =
      progress_.evaluation ? sharding::WalkOutputPlace(plan(), boundary_numbers_[visit], index)
                           : sharding::OutputPlace(plan(), visit, gradient, index);
  return {.data = core_.storage.At(place),
          .dtype = boundary_dtypes_[static_cast<size_t>(visit)],
          .shape = {&boundary_elements_[static_cast<size_t>(visit)], 1},
          .origin = view_errors_.Of(shown, scope->visit)};
}

int ScopeViews::BeforeOf(const OpenScope& scope) const {
  return sharding::BoundaryBefore(core_.inputs.model, scope.visit);
}

MutableTensorView ScopeViews::Input(int64_t id, int micro_batch) {
  const OpenScope* scope = Find(id);
  if (scope == nullptr) return {};
  return Boundary(id, micro_batch, BeforeOf(*scope), /*gradient=*/false, Shown::kInput);
}
MutableTensorView ScopeViews::Output(int64_t id, int micro_batch) {
  const OpenScope* scope = Find(id);
  if (scope == nullptr) return {};
  return Boundary(id, micro_batch, scope->visit, /*gradient=*/false, Shown::kOutput);
}
MutableTensorView ScopeViews::OutputGradient(int64_t id, int micro_batch) {
  const OpenScope* scope = Find(id);
  if (scope == nullptr) return {};
  return Boundary(id, micro_batch, scope->visit, /*gradient=*/true, Shown::kOutputGradient);
}
MutableTensorView ScopeViews::InputGradient(int64_t id, int micro_batch) {
  const OpenScope* scope = Find(id);
  if (scope == nullptr) return {};
  const bool has_one = scope->planned < 0
                           ? scope->visit > sharding::FirstTrainableVisit(core_.inputs.model)
                           : progress_.PlannedScopeOf(scope->planned).input_gradient;
  if (!has_one) return {};
  return Boundary(id, micro_batch, BeforeOf(*scope), /*gradient=*/true, Shown::kInputGradient);
}

// Mistakes.

void ScopeViews::Refuse(absl::Status mistake) {
  if (const std::string line = view_errors_.Note(std::move(mistake)); !line.empty())
    LogWarning(line);
  TakeErrors();
}

void ScopeViews::TakeErrors() {
  if (view_errors_.any()) core_.errors.Note(view_errors_.Take());
}

void ScopeViews::Poison(const OpenScope& closed) {
  const std::vector<OpenScope>& open = progress_.open;
  const bool is_shown = std::any_of(
      open.begin(), open.end(), [&](const OpenScope& other) { return other.unit == closed.unit; });
  if (!is_shown && progress_.PlannedScopeOf(closed.planned).releases) Poison(closed.unit);
}

void ScopeViews::Poison(int unit) {
  if (!kPoisonReleased || !HostReaches(core_.inputs.device)) return;
  const int64_t size = SizeOf(sharding::ParameterDType(plan(), unit));
  for (const bool trainable : {true, false}) {
    const int64_t elements = sharding::SectionOf(plan(), unit, trainable).elements;
    if (elements == 0) continue;
    std::memset(core_.storage.At(sharding::WholePlace(plan(), unit, trainable)), kPoison,
                static_cast<size_t>(elements * size));
  }
}

}  // namespace ebb
