#include "ebb/sharding/scopes.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb::sharding {

bool IsTrainable(const ModelSpec& model, UnitId unit) {
  const std::vector<ParameterId>& parameters = model[unit].parameters;
  return std::any_of(parameters.begin(), parameters.end(),
                     [&](ParameterId id) { return model[id].trainable; });
}

int FirstTrainableVisit(const ModelSpec& model) {
  const auto found =
      std::find_if(model.forward.begin(), model.forward.end(),
                   [&](const Visit& visit) { return IsTrainable(model, visit.unit); });
  return static_cast<int>(found - model.forward.begin());
}

int BoundaryBefore(const ModelSpec& model, int visit) {
  if (model.forward[visit].of_part) return -1;
  int before = visit - 1;
  while (before >= 0 && model.forward[before].of_part) --before;
  return before;
}

bool HandsOn(const ModelSpec& model, int visit) {
  const auto at = model.forward.begin() + visit;
  return !at->of_part && std::any_of(at + 1, model.forward.end(),
                                     [](const Visit& behind) { return !behind.of_part; });
}

std::vector<ScopeEvent> EventsOfRound(const ModelSpec& model) {
  if (!model.order.empty()) return model.order;
  std::vector<ScopeEvent> events;
  const auto add = [&](ScopeEvent scope) {
    events.push_back(scope);
    scope.opens = false;
    events.push_back(scope);
  };
  const int visits = static_cast<int>(model.forward.size());
  for (int v = 0; v < visits; ++v)
    if (model.forward[v].forward) add({.visit = v});
  for (int v = visits - 1, first = FirstTrainableVisit(model); v >= first; --v)
    if (model.forward[v].backward) add({.backward = true, .visit = v});
  return events;
}

std::vector<bool> VisitsWithBackward(const ModelSpec& model) {
  std::vector<bool> found(model.forward.size(), false);
  for (const ScopeEvent& event : EventsOfRound(model))
    if (event.backward) found[event.visit] = true;
  return found;
}

std::vector<bool> VisitsWithGradients(const ModelSpec& model) {
  std::vector<bool> found = VisitsWithBackward(model);
  for (size_t v = 0; v < found.size(); ++v) {
    const Visit& visit = model.forward[v];
    found[v] = found[v] && visit.gradients && IsTrainable(model, visit.unit);
  }
  return found;
}

namespace {

using enum ScopeKind;
constexpr int kNever = -1;

ScopeKind KindOf(const ScopeEvent& event) {
  return sharding::KindOf(event.backward, event.recompute);
}

// Indices of events that have happened so far.
struct ScopeTimes {
  int opened = kNever, closed = kNever;
  bool is_open() const { return opened > closed; }
};

class OrderCheck {
 public:
  explicit OrderCheck(const ModelSpec& model)
      : model_(model), events_(EventsOfRound(model)), visits_(model.forward.size()) {}

  absl::Status Run();

 private:
  const Visit& VisitOf(int visit) const { return model_.forward[visit]; }
  ScopeTimes& Times(int visit, ScopeKind kind) { return visits_[visit][static_cast<size_t>(kind)]; }
  bool TakesGradients(int visit) const {
    return VisitOf(visit).gradients && IsTrainable(model_, VisitOf(visit).unit);
  }
  bool OwnsBoundaries() const {
    return std::any_of(model_.forward.begin(), model_.forward.end(),
                       [](const Visit& visit) { return visit.output_bytes > 0; });
  }

  std::string UnitOf(int visit) const {
    const UnitId unit = VisitOf(visit).unit;
    return absl::StrCat("unit ", static_cast<int>(unit), " (\"", model_[unit].name, "\")");
  }
  std::string NameOf(int visit) const {
    return absl::StrCat("visit ", visit, ", to ", UnitOf(visit));
  }
  // The sentence's start: event 7 of order opens the backward of visit 2, to unit 1 ("block").
  std::string Event(int number) const {
    const ScopeEvent& event = events_[number];
    return absl::StrCat(
        model_.order.empty() ? "a round " : absl::StrCat("event ", number, " of ModelSpec::order "),
        event.opens ? "opens" : "closes", " the ", Name(KindOf(event)), " of ",
        NameOf(event.visit));
  }
  template <class... Text>
  static absl::Status Refuse(const Text&... text) {
    return absl::InvalidArgumentError(absl::StrCat(text...));
  }

  absl::Status CheckEvents() const;  // checks each event by itself
  absl::Status Open(int number);
  absl::Status OpenForward(int number);
  absl::Status OpenBackward(int number);
  absl::Status OpenRecompute(int number);
  absl::Status OpenWithBoundaries(int number);
  absl::Status Close(int number);
  absl::Status CheckAllClosed() const;
  absl::Status CheckVisits();
  absl::Status CheckUnits() const;
  absl::Status CheckRecomputes() const;
  absl::Status CheckBoundaries();

  const ModelSpec& model_;
  const std::vector<ScopeEvent> events_;
  std::vector<std::array<ScopeTimes, 3>> visits_;  // by kind; for recomputes, the newest
  std::vector<int> open_;                          // the events that opened the open scopes
};

absl::Status OrderCheck::CheckEvents() const {
  for (size_t i = 0; i < events_.size(); ++i) {
    const ScopeEvent& event = events_[i];
    if (event.visit < 0 || event.visit >= static_cast<int>(model_.forward.size())) {
      return Refuse("event ", i, " of ModelSpec::order is of visit ", event.visit,
                    ", but those of ModelSpec::forward go from 0 to ",
                    static_cast<int64_t>(model_.forward.size()) - 1, "; use its indices");
    }
    if (event.backward && event.recompute) {
      return Refuse("event ", i, " of ModelSpec::order, of ", NameOf(event.visit),
                    ", is of both a backward and a recompute; set one of the two");
    }
  }
  return absl::OkStatus();
}

absl::Status OrderCheck::Open(int number) {
  const ScopeEvent& event = events_[number];
  const ScopeKind kind = KindOf(event);
  ScopeTimes& times = Times(event.visit, kind);
  if (times.is_open() || (kind != kRecompute && times.opened != kNever)) {
    return Refuse(Event(number), ", which event ", times.opened, " has opened",
                  kind == kRecompute
                      ? ": close it before it opens again"
                      : ": a visit has one of each, so declare a visit for each use");
  }
  EBB_RETURN_IF_ERROR(kind == kForward    ? OpenForward(number)
                      : kind == kBackward ? OpenBackward(number)
                                          : OpenRecompute(number));
  EBB_RETURN_IF_ERROR(OpenWithBoundaries(number));
  times.opened = number;
  open_.push_back(number);
  return absl::OkStatus();
}

absl::Status OrderCheck::OpenForward(int number) {
  const int visit = events_[number].visit;
  if (VisitOf(visit).forward) return absl::OkStatus();
  return Refuse(Event(number), ", which has none (Visit::forward is false): set it, or leave out ",
                "the event");
}

absl::Status OrderCheck::OpenBackward(int number) {
  const int visit = events_[number].visit;
  if (!VisitOf(visit).backward) {
    return Refuse(Event(number), ", which has none (Visit::backward is false): set it, or leave ",
                  "out the event");
  }
  const ScopeTimes &forward = Times(visit, kForward), &recompute = Times(visit, kRecompute);
  if (VisitOf(visit).forward && forward.closed == kNever) {
    return Refuse(Event(number), " before its forward has closed: a visit's backward comes behind ",
                  "its forward");
  }
  if (recompute.is_open()) {
    return Refuse(Event(number), " while its recompute is open, since event ", recompute.opened,
                  ": close that first");
  }
  if (!TakesGradients(visit)) return absl::OkStatus();
  for (int other : open_) {
    const ScopeEvent& opened = events_[other];
    if (!opened.backward || VisitOf(opened.visit).unit != VisitOf(visit).unit ||
        !TakesGradients(opened.visit))
      continue;
    return Refuse(
        Event(number), " while event ", other, " has that of visit ", opened.visit,
        " open, and both take gradients, which have one place: close the first before, or ",
        "set Visit::gradients of one to false");
  }
  return absl::OkStatus();
}

absl::Status OrderCheck::OpenRecompute(int number) {
  const int visit = events_[number].visit;
  if (VisitOf(visit).forward && Times(visit, kForward).closed == kNever) {
    return Refuse(Event(number), " before its forward has closed: a recompute is inside backward, ",
                  "between its visit's forward and backward");
  }
  if (const ScopeTimes& backward = Times(visit, kBackward); backward.opened != kNever) {
    return Refuse(Event(number), " behind its backward, which event ", backward.opened,
                  " has opened: a recompute comes before it");
  }
  return absl::OkStatus();
}

// A boundary passes from one scope to the next.
absl::Status OrderCheck::OpenWithBoundaries(int number) {
  if (!OwnsBoundaries() || open_.empty() || VisitOf(events_[number].visit).of_part)
    return absl::OkStatus();
  return Refuse(
      Event(number), " while ", NameOf(events_[open_.back()].visit), " is open, since event ",
      open_.back(),
      ": boundary activations of the engine (Visit::output_bytes) pass from one scope to ",
      "the next, so close that first, or keep them in the trainer (output_bytes 0)");
}

absl::Status OrderCheck::Close(int number) {
  const ScopeEvent& event = events_[number];
  ScopeTimes& times = Times(event.visit, KindOf(event));
  if (!times.is_open()) {
    return Refuse(Event(number), ", which is not open: an event that opens it comes before");
  }
  std::erase(open_, times.opened);
  times.closed = number;
  return absl::OkStatus();
}

absl::Status OrderCheck::CheckAllClosed() const {
  if (open_.empty()) return absl::OkStatus();
  return Refuse(Event(open_.front()),
                ", which no event closes: every scope of a round closes in it ({.opens = false})");
}

absl::Status OrderCheck::CheckVisits() {
  for (int v = 0; v < static_cast<int>(visits_.size()); ++v) {
    if (VisitOf(v).forward && Times(v, kForward).opened == kNever) {
      return Refuse("ModelSpec::order never opens the forward of ", NameOf(v),
                    ": add it, or set Visit::forward to false");
    }
    if (VisitOf(v).backward && TakesGradients(v) && Times(v, kBackward).opened == kNever) {
      return Refuse("ModelSpec::order never opens the backward of ", NameOf(v),
                    ", which takes gradients: add it, or set Visit::backward to false");
    }
  }
  return absl::OkStatus();
}

// An update comes when the last gradient is there.
absl::Status OrderCheck::CheckUnits() const {
  constexpr size_t kNone = static_cast<size_t>(-1);
  std::vector<int> closed(model_.units.size(), kNever);  // its last scope that takes gradients
  for (size_t i = 0; i < events_.size(); ++i) {
    const ScopeEvent& event = events_[i];
    if (!event.opens && event.backward && TakesGradients(event.visit))
      closed[static_cast<size_t>(VisitOf(event.visit).unit)] = static_cast<int>(i);
  }
  for (size_t u = 0; u < model_.units.size(); ++u) {
    if (!IsTrainable(model_, static_cast<UnitId>(u)) || closed[u] != kNever) continue;
    return Refuse("unit ", u, " (\"", model_.units[u].name,
                  "\") is trainable, but none of its visits takes its gradients (Visit::backward, ",
                  "Visit::gradients): let one take them, or set ParameterSpec::trainable to false");
  }
  size_t late = kNone;
  for (size_t i = 0; i < events_.size() && late == kNone; ++i) {
    const UnitId unit = VisitOf(events_[i].visit).unit;
    if (IsTrainable(model_, unit) && static_cast<int>(i) > closed[static_cast<size_t>(unit)])
      late = i;
  }
  if (late == kNone) return absl::OkStatus();
  const int last = closed[static_cast<size_t>(VisitOf(events_[late].visit).unit)];
  return Refuse(
      Event(static_cast<int>(late)), " behind the backward of visit ", events_[last].visit,
      ", the last that takes gradients of that unit, which may be updated by then: let the ",
      "unit's last scope of a round take them (Visit::gradients)");
}

absl::Status OrderCheck::CheckRecomputes() const {
  size_t backward = 0;
  for (size_t i = 0; i < events_.size(); ++i)
    if (events_[i].backward) backward = i;
  for (size_t i = 0; i < events_.size(); ++i) {
    if (!events_[i].recompute || i < backward) continue;
    return Refuse(Event(static_cast<int>(i)), ", which no backward follows: a recompute is inside ",
                  "backward");
  }
  return absl::OkStatus();
}

// Every visit reads the boundary of the visit before it, and writes that boundary's gradient.
absl::Status OrderCheck::CheckBoundaries() {
  if (!OwnsBoundaries()) return absl::OkStatus();
  const int visits = static_cast<int>(visits_.size());
  constexpr char kChain[] =
      ", but boundary activations of the engine (Visit::output_bytes) pass through all visits in "
      "their order: ";
  for (int v = 0; v < visits; ++v) {
    if (VisitOf(v).of_part) continue;
    const bool is_last = !HandsOn(model_, v);
    int behind = v + 1;
    while (!is_last && VisitOf(behind).of_part) ++behind;
    const ScopeTimes forward = Times(v, kForward), backward = Times(v, kBackward);
    if (forward.opened == kNever && !is_last)
      return Refuse(NameOf(v), " has no forward", kChain, "set Visit::forward");
    if (is_last) continue;
    const ScopeTimes next = Times(behind, kForward), after = Times(behind, kBackward);
    if (next.opened != kNever && next.opened < forward.opened) {
      return Refuse(Event(next.opened), " before that of visit ", v, kChain,
                    "let forward come in the order of ModelSpec::forward");
    }
    if (backward.opened == kNever) continue;
    if (after.opened == kNever) {
      return Refuse(NameOf(v), " has a backward and visit ", behind, " has none", kChain,
                    "set Visit::backward of all visits behind a trainable one");
    }
    if (after.opened > backward.opened) {
      return Refuse(Event(after.opened), " behind that of visit ", v, kChain,
                    "let backward come in the reverse order of ModelSpec::forward");
    }
  }
  return absl::OkStatus();
}

absl::Status OrderCheck::Run() {
  EBB_RETURN_IF_ERROR(CheckEvents());
  for (int i = 0; i < static_cast<int>(events_.size()); ++i) {
    EBB_RETURN_IF_ERROR(events_[i].opens ? Open(i) : Close(i));
  }
  EBB_RETURN_IF_ERROR(CheckAllClosed());
  EBB_RETURN_IF_ERROR(CheckVisits());
  EBB_RETURN_IF_ERROR(CheckUnits());
  EBB_RETURN_IF_ERROR(CheckRecomputes());
  return CheckBoundaries();
}

}  // namespace

absl::Status CheckOrder(const ModelSpec& model) {
  return OrderCheck(model).Run();
}

namespace {

// One round of these events, ticks counted from 1.
std::vector<PlannedScope> ScopesOfEvents(const ModelSpec& model,
                                         std::span<const ScopeEvent> events) {
  const std::vector<bool> backward = VisitsWithBackward(model),
                          gradients = VisitsWithGradients(model);
  std::vector<PlannedScope> scopes;
  std::vector<size_t> open;
  for (size_t i = 0; i < events.size(); ++i) {
    const ScopeEvent& event = events[i];
    const size_t visit = static_cast<size_t>(event.visit);
    const int tick = static_cast<int>(i) + 1;
    if (event.opens) {
      open.push_back(scopes.size());
      scopes.push_back({.backward = event.backward,
                        .recompute = event.recompute,
                        .visit = event.visit,
                        .unit = static_cast<int>(model.forward[visit].unit),
                        .open_tick = tick,
                        .gradients = event.backward && gradients[visit],
                        .input = BoundaryBefore(model, event.visit),
                        .hands_on = HandsOn(model, event.visit)});
      PlannedScope& scope = scopes.back();
      scope.input_gradient = event.backward && scope.input >= 0 && backward[scope.input];
      continue;
    }
    const auto closed = std::find_if(open.begin(), open.end(), [&](size_t s) {
      return scopes[s].visit == event.visit && scopes[s].backward == event.backward &&
             scopes[s].recompute == event.recompute;
    });
    scopes[*closed].close_tick = tick;
    open.erase(closed);
  }
  return scopes;
}

}  // namespace

std::vector<PlannedScope> ScopesOfWalk(const ModelSpec& model) {
  std::vector<ScopeEvent> forward;
  for (const ScopeEvent& event : EventsOfRound(model))
    if (!event.backward && !event.recompute) forward.push_back(event);
  return ScopesOfEvents(model, forward);
}

std::vector<PlannedScope> ScopesOfStep(const ModelSpec& model, int rounds) {
  const std::vector<PlannedScope> one = ScopesOfEvents(model, EventsOfRound(model));
  const int ticks = 2 * static_cast<int>(one.size());
  std::vector<PlannedScope> scopes;
  scopes.reserve(static_cast<size_t>(rounds) * one.size());
  for (int round = 0; round < rounds; ++round) {
    for (PlannedScope scope : one) {
      scope.round = round;
      scope.open_tick += round * ticks;
      scope.close_tick += round * ticks;
      scopes.push_back(scope);
    }
  }
  return scopes;
}

std::vector<ScopeTick> TicksOf(std::span<const PlannedScope> scopes) {
  std::vector<ScopeTick> ticks(2 * scopes.size());
  for (size_t s = 0; s < scopes.size(); ++s) {
    const int scope = static_cast<int>(s);
    ticks[static_cast<size_t>(scopes[s].open_tick) - 1] = {.scope = scope, .opens = true};
    ticks[static_cast<size_t>(scopes[s].close_tick) - 1] = {.scope = scope, .opens = false};
  }
  return ticks;
}

}  // namespace ebb::sharding
