// Opening and closing scopes: the trainer's side of the plan's moments.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/reduction.h"

namespace ebb {

using sharding::Moment;
using sharding::PlannedScope;
using sharding::ScopeKind;
using sharding::Section;

ForwardScope Executor::OpenForward(int64_t number, UnitId unit) {
  return ForwardScope(this, Open(number, ScopeKind::kForward, unit), view_errors_.number());
}
ForwardScope Executor::OpenRecompute(int64_t number, UnitId unit) {
  return ForwardScope(this, Open(number, ScopeKind::kRecompute, unit), view_errors_.number());
}
BackwardScope Executor::OpenBackward(int64_t number, UnitId unit) {
  return BackwardScope(this, Open(number, ScopeKind::kBackward, unit), view_errors_.number());
}

int64_t Executor::Open(int64_t number, ScopeKind kind, UnitId id) {
  constexpr const char* kCalls[] = {"Forward", "Backward", "Recompute"};
  if (!IsOpen(number, kCalls[static_cast<size_t>(kind)])) return 0;
  const bool backward = kind == ScopeKind::kBackward;
  TakeViewErrors();
  const int unit = static_cast<int>(id);
  if (unit < 0 || unit >= static_cast<int>(model_.units.size())) {
    errors_.Note(absl::InvalidArgumentError(
        absl::StrCat("unit ", unit, " is not of this engine's model, which has ",
                     model_.units.size(), " units")));
    return 0;
  }
  if (backward && progress_.reduced) {
    errors_.Note(absl::FailedPreconditionError(absl::StrCat(
        ScopeName(kind, unit), " after Step::Reduce, which has made the gradients final")));
    return 0;
  }
  const int code = sharding::ScopeCode(kind, unit);
  progress_.log.push_back(code);

  OpenScope scope{
      .id = ++last_scope_id_, .unit = unit, .kind = kind, .opened_ns = Timeline::NowNs()};
  profiler_ranges_->Open(scope.id, kind, unit);
  const int expected = NextCode();
  const sharding::Match match = progress_.order.Open(kind, unit);
  if (progress_.evaluation && match.kind == sharding::Match::kNextRound) Start();
  scope.planned = match.scope;
  scope.round = progress_.order.round();
  if (scope.planned >= 0) {
    scope.visit = progress_.run->plan.scopes[scope.planned].visit;
  } else {
    scope.visit = VisitOf(unit, backward);
  }
  progress_.trail.Open(code, expected, NextCode());
  FollowOrder(match, kind, unit);
  progress_.any_backward |= backward;
  if (match.kind == sharding::Match::kRefused) {
    issuer_->Fence();
  } else if (match.kind == sharding::Match::kAgain) {
    OpenAgain(scope);
  } else {
    Advance();
    if (!progress_.awaited[OpeningOf(scope.planned)]) OpenAheadOfHeld(scope);
  }
  if (timeline_ != nullptr && progress_.trace.shown) {
    const int64_t now = Timeline::NowNs();
    timeline_->Add({.operation = "wait",
                    .subject = model_.units[unit].name,
                    .track = 0,
                    .begin_ns = scope.opened_ns,
                    .end_ns = now,
                    .step = progress_.trace.step,
                    .evaluation = progress_.trace.evaluation});
    scope.opened_ns = now;
  }
  open_.push_back(scope);
  return scope.id;
}

// Runs the plan's moments in order as far as the trainer has come. A scope left open holds back
// what comes after its close, and one that is not the plan's everything.
void Executor::Advance() {
  if (std::any_of(open_.begin(), open_.end(),
                  [](const OpenScope& scope) { return scope.planned < 0; }))
    return;
  const std::vector<sharding::FragmentMoment>& moments = progress_.fragment->fragment().moments;
  const sharding::OrderProgress& order = progress_.order;
  while (progress_.moment < moments.size()) {
    const sharding::FragmentMoment& moment = moments[progress_.moment];
    if (moment.kind == Moment::kFinish) return;  // Finish's own
    if (moment.kind == Moment::kOpen && !order.has_come(moment.scope)) return;
    if (moment.kind == Moment::kClose && !order.is_over(moment.scope)) return;
    ++progress_.moment;
    if (moment.kind == Moment::kClose &&
        order.state(moment.scope) == sharding::OrderProgress::State::kLeftOut) {
      const PlannedScope& planned = progress_.run->plan.scopes[moment.scope];
      const OpenScope left_out{.planned = moment.scope,
                               .unit = planned.unit,
                               .visit = planned.visit,
                               .round = planned.round,
                               .kind = planned.kind()};
      if (ReducesAfter(left_out)) CompleteGradient(left_out);
    }
    // What has run since the moment before.
    const size_t at = progress_.moment - 1;
    if (at > 0 && moments[at - 1].kernels >= 0)
      issuer_->EndKernels(*progress_.fragment, moments[at - 1].kernels, TagOf());
    Issue(moment.begin, moment.end);
    if (moment.kernels >= 0 && !std::exchange(progress_.awaited[at], uint8_t{1}))
      issuer_->StartKernels(*progress_.fragment, moment.kernels, TagOf());
  }
}

// The moment of its opening.
size_t Executor::OpeningOf(int scope) const {
  return static_cast<size_t>(progress_.run->plan.scopes[static_cast<size_t>(scope)].open_tick);
}

// Of a scope that is none of the order's: the unit's last visit, and of a backward one that has a gradient.
int Executor::VisitOf(int unit, bool backward) const {
  int found = 0;
  bool has_gradient = false;
  for (size_t v = 0; v < model_.forward.size(); ++v) {
    const Visit& visit = model_.forward[v];
    if (static_cast<int>(visit.unit) != unit) continue;
    const bool takes = visit.backward && visit.gradients;
    if (backward && has_gradient && !takes) continue;
    has_gradient = takes;
    found = static_cast<int>(v);
  }
  return found;
}

void Executor::Close(int64_t id) {
  if (OpenScope* scope = Find(id)) CloseScope(*scope);
}

void Executor::CloseScope(OpenScope& scope) {
  TakeViewErrors();  // before what this rank adds is updated with
  const OpenScope closing = scope;
  open_.erase(open_.begin() + (&scope - open_.data()));
  if (timeline_ != nullptr && progress_.trace.shown) {
    constexpr const char* kNames[] = {"forward", "backward", "recompute"};
    timeline_->Add({.operation = kNames[static_cast<size_t>(closing.kind)],
                    .subject = model_.units[closing.unit].name,
                    .track = 0,
                    .begin_ns = closing.opened_ns,
                    .end_ns = Timeline::NowNs(),
                    .step = progress_.trace.step,
                    .evaluation = progress_.trace.evaluation});
  }
  if (ReducesAfter(closing)) CompleteGradient(closing);
  progress_.order.Close(closing.planned);
  if (closing.planned < 0) {
    CloseAgain(closing);
  } else if (kPoisonReleased && device_.kind() == DeviceKind::kCpu) {
    PoisonSlot(closing);
  }
  Advance();
  profiler_ranges_->Close(closing.id);
}

bool Executor::ReducesAfter(const OpenScope& scope) const {
  const sharding::Decisions& decisions = progress_.run->plan.decisions;
  return scope.planned >= 0 && progress_.run->plan.scopes[scope.planned].gradients &&
         (!decisions.keeps_step_gradients || scope.round == decisions.rounds - 1);
}

// What backward did not ask for is zero, and so is the padding between parameters.
void Executor::CompleteGradient(const OpenScope& scope) {
  const sharding::Plan& plan = progress_.run->plan;
  const Section& section = plan.layout.units[scope.unit].trainable;
  const int64_t size = SizeOf(plan.decisions.gradient);
  std::byte* const whole = storage_->Gradient(scope.visit);
  std::vector<uint8_t>& requested =
      requested_[GradientKey(plan.decisions, {.visit = scope.visit, .unit = scope.unit})];
  int64_t end = 0;
  for (size_t p = 0; p < section.placements.size(); ++p) {
    const sharding::Placement& placement = section.placements[p];
    if (!requested[p]) continue;
    if (placement.offset > end) compute_.Zero(whole + end * size, (placement.offset - end) * size);
    end = placement.offset + placement.elements;
    requested[p] = 0;
  }
  if (section.elements > end) compute_.Zero(whole + end * size, (section.elements - end) * size);
}

void Executor::PoisonSlot(const OpenScope& scope) {
  const sharding::Plan& plan = progress_.run->plan;
  if (plan.decisions.kept_whole[scope.unit]) return;
  for (const OpenScope& other : open_) {
    if (other.unit == scope.unit) return;
  }
  for (size_t s = 0; s < plan.scopes.size(); ++s) {
    if (plan.scopes[s].unit == scope.unit &&
        plan.gather_of_scope[s] == plan.gather_of_scope[scope.planned] &&
        plan.scopes[s].close_tick > plan.scopes[scope.planned].close_tick)
      return;  // stays gathered
  }
  PoisonUnit(scope.unit);
}

void Executor::PoisonUnit(int unit) {
  const sharding::UnitLayout& layout = plan().layout.units[static_cast<size_t>(unit)];
  const int64_t size = SizeOf(plan().decisions.compute);
  std::memset(storage_->Whole(unit, true), kPoison,
              static_cast<size_t>(layout.trainable.elements * size));
  std::memset(storage_->Whole(unit, false), kPoison,
              static_cast<size_t>(layout.frozen.elements * size));
}

// Views.

// A request for a view that there is not: the trainer goes on with an empty one.
void Executor::Refuse(absl::Status mistake) {
  if (const std::string line = view_errors_.Note(std::move(mistake)); !line.empty())
    LogWarning(line);
  TakeViewErrors();
}

void Executor::TakeViewErrors() {
  if (view_errors_.any()) errors_.Note(view_errors_.Take());
}

OpenScope* Executor::Find(int64_t id) {
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const OpenScope& scope) { return scope.id == id; });
  return found == open_.end() ? nullptr : &*found;
}
const OpenScope* Executor::Find(int64_t id) const {
  return const_cast<Executor*>(this)->Find(id);
}

bool Executor::Holds(const OpenScope& scope, ParameterId p) const {
  const std::vector<sharding::ParameterLocation>& parameters = plan().layout.parameters;
  const size_t index = static_cast<size_t>(p);
  return index < parameters.size() && parameters[index].unit == scope.unit;
}

absl::Status Executor::NotHeld(absl::string_view what, const OpenScope& scope,
                               ParameterId p) const {
  const std::vector<sharding::ParameterLocation>& parameters = plan().layout.parameters;
  const size_t index = static_cast<size_t>(p);
  const std::string asked = absl::StrCat(" asked of ", ScopeName(scope.kind, scope.unit), ", ");
  if (index >= parameters.size()) {
    return absl::InvalidArgumentError(absl::StrCat(what, "parameter ", static_cast<int>(p), asked,
                                                   "but the model has ", parameters.size(),
                                                   " parameters: the view is empty"));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      what, "parameter '", model_.parameters[index].name, "'", asked,
      "which does not hold it: it is of unit '",
      model_.units[static_cast<size_t>(parameters[index].unit)].name, "', and the view is empty"));
}

TensorView Executor::Parameter(int64_t id, ParameterId p) {
  const OpenScope* scope = Find(id);
  if (scope == nullptr) return {};
  const size_t index = static_cast<size_t>(p);
  const sharding::Plan& plan = progress_.run->plan;
  if (!Holds(*scope, p)) {
    Refuse(NotHeld("", *scope, p));
    return {};
  }
  const sharding::ParameterLocation& location = plan.layout.parameters[index];
  return {.data = storage_->Whole(scope->unit, location.trainable) +
                  location.offset * SizeOf(plan.decisions.compute),
          .dtype = plan.decisions.compute,
          .shape = model_.parameters[index].shape,
          .origin = view_errors_.Of(Shown::kParameter, static_cast<int>(index))};
}

BackwardScope::Fused Executor::Gradient(int64_t id, ParameterId p, bool zero_fill) {
  const OpenScope* scope = Find(id);
  if (scope == nullptr) return {};
  const size_t index = static_cast<size_t>(p);
  const sharding::Plan& plan = progress_.run->plan;
  if (!Holds(*scope, p)) {
    Refuse(NotHeld("the gradient of ", *scope, p));
    return {};
  }
  const sharding::ParameterLocation& location = plan.layout.parameters[index];
  if (!location.trainable) {
    Refuse(absl::InvalidArgumentError(absl::StrCat("the gradient of parameter '",
                                                   model_.parameters[index].name,
                                                   "', which is frozen (trainable = false)")));
    return {};
  }
  if (scope->planned >= 0 ? !plan.scopes[scope->planned].gradients
                          : !model_.forward[scope->visit].gradients) {
    Refuse(absl::InvalidArgumentError(
        absl::StrCat("the gradient of parameter '", model_.parameters[index].name, "' in ",
                     ScopeName(scope->kind, scope->unit), ", visit ", scope->visit,
                     " of forward, which takes no gradients (Visit::gradients is false)")));
    return {};
  }
  const Section& section = plan.layout.units[scope->unit].trainable;
  const auto placement =
      std::find_if(section.placements.begin(), section.placements.end(),
                   [&](const sharding::Placement& candidate) { return candidate.parameter == p; });
  uint8_t& requested =
      requested_[GradientKey(plan.decisions, {.visit = scope->visit, .unit = scope->unit})]
                [static_cast<size_t>(placement - section.placements.begin())];
  const int64_t size = SizeOf(plan.decisions.gradient);
  std::byte* const data = storage_->Gradient(scope->visit) + location.offset * size;
  const bool first = requested == 0;
  requested = 1;
  if (first && zero_fill) compute_.Zero(data, location.elements * size);
  return {.tensor = {.data = data,
                     .dtype = plan.decisions.gradient,
                     .shape = model_.parameters[index].shape,
                     .origin = view_errors_.Of(Shown::kGradient, static_cast<int>(index))},
          .beta = first ? 0.0f : 1.0f};
}

std::span<const int> Executor::MicroBatches(int64_t id) const {
  const OpenScope* scope = Find(id);
  if (scope == nullptr) return {};
  if (progress_.evaluation)
    return std::span(micro_batch_numbers_).first(static_cast<size_t>(progress_.micro_batches));
  const size_t per_round =
      static_cast<size_t>(progress_.run->plan.decisions.micro_batches_per_round);
  return std::span(micro_batch_numbers_)
      .subspan(static_cast<size_t>(scope->round) * per_round, per_round);
}

// What visit `visit` wrote as its output, or the gradient of that.
MutableTensorView Executor::Boundary(int64_t id, int micro_batch, int visit, bool gradient,
                                     Shown shown) {
  const OpenScope* scope = Find(id);
  if (scope == nullptr || visit < 0 || visit + 1 >= static_cast<int>(model_.forward.size()) ||
      model_.forward[visit].output_bytes == 0)
    return {};
  const std::span<const int> served = MicroBatches(id);
  if (std::find(served.begin(), served.end(), micro_batch) == served.end()) {
    Refuse(absl::InvalidArgumentError(
        absl::StrCat("micro-batch ", micro_batch, " asked of ", ScopeName(scope->kind, scope->unit),
                     ", which serves ", served.front(), " to ", served.back())));
    return {};
  }
  const int index = micro_batch - served.front();
  std::byte* data = progress_.evaluation ? storage_->EvaluationOutput(visit, index)
                    : gradient           ? storage_->OutputGradient(visit, index)
                                         : storage_->Output(visit, index);
  return {.data = data,
          .dtype = boundary_dtypes_[visit],
          .shape = {&boundary_elements_[visit], 1},
          .origin = view_errors_.Of(shown, scope->visit)};
}

MutableTensorView Executor::Input(int64_t id, int micro_batch) {
  const OpenScope* scope = Find(id);
  return scope == nullptr
             ? MutableTensorView{}
             : Boundary(id, micro_batch, scope->visit - 1, /*gradient=*/false, Shown::kInput);
}
MutableTensorView Executor::Output(int64_t id, int micro_batch) {
  const OpenScope* scope = Find(id);
  return scope == nullptr
             ? MutableTensorView{}
             : Boundary(id, micro_batch, scope->visit, /*gradient=*/false, Shown::kOutput);
}
MutableTensorView Executor::OutputGradient(int64_t id, int micro_batch) {
  const OpenScope* scope = Find(id);
  return scope == nullptr
             ? MutableTensorView{}
             : Boundary(id, micro_batch, scope->visit, /*gradient=*/true, Shown::kOutputGradient);
}
MutableTensorView Executor::InputGradient(int64_t id, int micro_batch) {
  const OpenScope* scope = Find(id);
  if (scope == nullptr) return {};
  const bool has_one = scope->planned < 0
                           ? scope->visit > sharding::FirstTrainableVisit(model_)
                           : progress_.run->plan.scopes[scope->planned].input_gradient;
  if (!has_one) return {};
  return Boundary(id, micro_batch, scope->visit - 1, /*gradient=*/true, Shown::kInputGradient);
}

}  // namespace ebb
