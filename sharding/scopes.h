// The scopes that a trainer opens in a step, from the model's order of a round, and their ticks:
//
//   tick     0       1    2    3    4     5    6    7    8
//            begin   F0(  F0)  F1(  F1)   B1(  B1)  B0(  B0)
//   nested   begin   F0(  F1(  F1)  F0)   B0(  B1(  B1)  B0)
//
// Scopes are numbered as they open.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "ebb/sharding/model.h"

namespace ebb::sharding {

// The order of a round as a model declares it: by ModelSpec::order, or else by ModelSpec::forward,
//
//   F0 F1 F2 F3  B3 B2 B1 B0     by visit
//
// Backward ends at the first trainable visit, and a visit may lack one of the two.
bool IsTrainable(const ModelSpec& model, UnitId unit);
// The first visit of a unit with something to train. forward.size() if nothing is trainable.
int FirstTrainableVisit(const ModelSpec& model);

// All that opens and closes in a round.
std::vector<ScopeEvent> EventsOfRound(const ModelSpec& model);

// By visit: whether it has a backward; whether that backward takes gradients.
std::vector<bool> VisitsWithBackward(const ModelSpec& model);
std::vector<bool> VisitsWithGradients(const ModelSpec& model);

// Boundaries pass from visit to visit, but for visits to parts (Visit::of_part). The visit whose
// output this one reads; -1: none.
int BoundaryBefore(const ModelSpec& model, int visit);
// Whether another visit reads this one's output.
bool HandsOn(const ModelSpec& model, int visit);

// The rules of ModelSpec::order and of Visit's flags. The model passes all other checks.
absl::Status CheckOrder(const ModelSpec& model);

enum class ScopeKind : uint8_t { kForward, kBackward, kRecompute };
constexpr ScopeKind KindOf(bool backward, bool recompute) {
  return backward ? ScopeKind::kBackward : recompute ? ScopeKind::kRecompute : ScopeKind::kForward;
}
constexpr const char* Name(ScopeKind kind) {
  return kind == ScopeKind::kForward    ? "forward"
         : kind == ScopeKind::kBackward ? "backward"
                                        : "recompute";
}

// A scope's kind and unit as one number, as records and logs of a step hold it.
constexpr int ScopeCode(ScopeKind kind, int unit) {
  return 3 * unit + static_cast<int>(kind);
}
constexpr ScopeKind KindOfCode(int64_t code) {
  return static_cast<ScopeKind>(code % 3);
}
constexpr int UnitOfCode(int64_t code) {
  return static_cast<int>(code / 3);
}

struct PlannedScope {
  bool backward = false, recompute = false;
  int round = 0;
  int visit = 0;  // index into ModelSpec::forward
  int unit = 0;
  // Ticks of the step: 0 is its begin, and every opening or closing is the next one.
  int open_tick = 0, close_tick = 0;
  bool gradients = false;  // backward: takes the unit's gradients
  int input = -1;          // BoundaryBefore its visit
  bool hands_on = false;   // HandsOn
  // Backward: the visit before has a backward too, which takes the gradient of this visit's input.
  bool input_gradient = false;
  bool is_reduced = false;  // its gradients are reduced once it has closed
  bool releases = false;    // the last to close of those that its gather serves

  ScopeKind kind() const { return KindOf(backward, recompute); }
};

std::vector<PlannedScope> ScopesOfStep(const ModelSpec& model, int rounds);
// One walk of an evaluation: forward only.
std::vector<PlannedScope> ScopesOfWalk(const ModelSpec& model);

// A scope opens or closes at tick 1, 2, ...
struct ScopeTick {
  int scope = 0;
  bool opens = true;
};
std::vector<ScopeTick> TicksOf(std::span<const PlannedScope> scopes);

}  // namespace ebb::sharding
