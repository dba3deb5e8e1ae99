// The meaning of a trainer's next Open. A model declares the order of a round's scopes. A trainer
// may leave some of them out, and may open a forward scope, or a recompute, again:
//
//   declared    F0 F1 F2 B2 B1 B0 | F0 F1 F2 ...
//   opened      F0    F2 B2    B0 | F0 ...            F1 and B1 are left out
//   opened      F0 F1 F0 F2 B2 B1 B0 | F0 ...         F0 is opened again, outside the order
//   opened      F0 F1 F2 B2 R0 B1 B0 | F0 ...         R0 is outside the order, too
//   opened      F0 F1 F2 B2 B0 B1                     refused: B1 was left out when B0 came
//
// A step that may leave out backwards may visit a unit less often than declared. The visits whose
// Forward came have the backwards:
//
//   declared    F0 F1 F1 F1 F2 B2 B1 B1 B1 B0         three visits of unit 1
//   opened      F0 F1 F1    F2 B2    B1 B1 B0         the last of them is left out
//   opened      F0 F1 F1 F1    B2 B1 B1 B1 B0         the forward of unit 2 is within its backward
//
// Only the order of opens counts. The order of closes does not matter here: scopes that the model
// declares open together may be open together.
//
// So a scope of the order is opened once or left out, and opened scopes come in its order. Work of
// a place in the order, such as the reduction of a gradient, happens once and there.
//
// Pure: the result depends on the calls alone. Reset in place, so that a step allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string_view>
#include <vector>

#include "ebb/sharding/scopes.h"

namespace ebb::sharding {

// Where a trainer declares its order. Error messages name it.
inline constexpr char kOrderDeclaredIn[] = "ModelSpec::order";

struct Match {
  enum Kind : uint8_t {
    kNext,       // the next scope of the order
    kAhead,      // a later one of the round
    kNextRound,  // one of the next round, or of the next walk
    kAgain,      // outside the order: parameters are shown, and no gradient is taken
    kRefused,
  };
  Kind kind = kRefused;
  int scope = -1;  // kNext, kAhead, kNextRound: counted over all rounds
  // The order's next scope; at its end the number of scopes. From it to `scope` all are left out.
  int expected = 0;
  std::string_view reason = {};  // kRefused: the text behind the scope's name in a Status
};

class OrderProgress {
 public:
  enum class State : uint8_t { kToCome, kOpen, kClosed, kLeftOut };

  // `round`: a round's scopes, which outlive this. `trainable`: by unit, whether it has gradients.
  // `may_leave_out`: a visit whose Forward does not come has no backward either. Otherwise all
  // backwards come, also of visits whose Forward is left out.
  void BeginStep(std::span<const PlannedScope> round, const std::vector<bool>& trainable,
                 int rounds, bool may_leave_out = false);
  // Begins an evaluation: any number of walks.
  void BeginWalks(std::span<const PlannedScope> walk);

  Match Open(ScopeKind kind, int unit);
  void Close(int scope);  // Match::scope, once for each Open
  // The trainer opens no more. Returns the first scope left out, or else the number of scopes.
  int LeaveOutRest();

  // Scopes of rounds before Release's round: kClosed.
  State state(int scope) const {
    if (scope >= left_out_from_) return State::kLeftOut;
    const int at = scope - first_round_ * per_round();
    if (at < 0) return State::kClosed;
    return at < std::ssize(states_) ? states_[at] : State::kToCome;
  }
  bool has_come(int scope) const { return state(scope) != State::kToCome; }
  bool is_over(int scope) const {
    return state(scope) == State::kClosed || state(scope) == State::kLeftOut;
  }
  // No call asks for scopes of rounds before this one any more, so their states take no memory.
  void Release(int round) { released_round_ = round; }
  int scopes() const { return rounds_ * per_round(); }
  int next() const { return next_; }    // the order's next scope; scopes() at its end
  int round() const { return round_; }  // the newest scope's
  // Between rounds, with no scope open: an evaluation may come.
  bool at_seam() const {
    return open_ == 0 && next_ > 0 && next_ < scopes() && next_ % per_round() == 0;
  }
  uint64_t hash() const { return hash_; }  // of the opened scopes, in their order

 private:
  int per_round() const { return static_cast<int>(scopes_.size()); }
  const PlannedScope& ScopeOf(int scope) const { return scopes_[scope % per_round()]; }
  void Begin(std::span<const PlannedScope> scopes, int rounds);
  void StartWalk();
  Match Find(ScopeKind kind, int unit);
  int FindFrom(int begin, int end, ScopeKind kind, int unit) const;  // -1: none
  int FindInRound(int end, ScopeKind kind, int unit) const;          // likewise
  bool ForwardHasCome(int scope) const;
  bool IsForwardWithin(int scope) const;
  bool MayStartNextRound(int unit) const;
  std::string_view WhyNoBackward(int unit) const;
  std::string_view WhyNotInRound(int scope) const;
  void LeaveOut(int end);
  void MakeRoom(int scope);
  void Set(int scope, State state) { states_[scope - first_round_ * per_round()] = state; }
  void Take(int scope);

  std::span<const PlannedScope> scopes_;
  const std::vector<bool>* trainable_ = nullptr;  // null: walks
  bool may_leave_out_ = false;
  // States of the rounds from `first_round_` on, as far as they have begun or fit the memory taken.
  std::vector<State> states_;
  int rounds_ = 1, first_round_ = 0, released_round_ = 0;
  int left_out_from_ = 0;  // scopes() if none is left out at the end
  int next_ = 0, round_ = 0;
  int open_ = 0;  // scopes of any kind
  // In round round_: a Backward came; behind it, a Forward outside the order.
  bool backward_begun_ = false, recomputed_ = false;
  uint64_t hash_ = 0;
};

}  // namespace ebb::sharding
