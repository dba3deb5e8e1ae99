// What the next Open of a trainer means. A model declares the order in which scopes come in a round; a
// trainer may leave some of them out, and may open a forward scope, or a recompute, again:
//
//   declared    F0 F1 F2 B2 B1 B0 | F0 F1 F2 ...
//   opened      F0    F2 B2    B0 | F0 ...            F1 and B1 are left out
//   opened      F0 F1 F0 F2 B2 B1 B0 | F0 ...         F0 is opened again: it is no scope of the order
//   opened      F0 F1 F2 B2 R0 B1 B0 | F0 ...         R0 is none of the order either
//   opened      F0 F1 F2 B2 B0 B1                     refused: B1 was left out when B0 came
//
// What counts is in which order scopes open. When they close makes no difference here: those that the model declares
// to be open together may be.
//
// A scope of the order is thus opened once or left out, and those that are opened come in its order. So
// whatever hangs on a place in the order, as the reduction of a gradient, happens once and there.
//
// Pure: nothing but the calls counts. Reset in place, so that a step allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string_view>
#include <vector>

#include "ebb/sharding/scopes.h"

namespace ebb::sharding {

// Where a trainer declares its order, for sentences that ask for it.
inline constexpr char kOrderDeclaredIn[] = "ModelSpec::order";

struct Match {
  enum Kind : uint8_t {
    kNext,       // the next scope of the order
    kAhead,      // a later one of the round
    kNextRound,  // one of the next round, or of the next walk
    kAgain,      // none: parameters are shown, and no gradient is taken
    kRefused,
  };
  Kind kind = kRefused;
  int scope = -1;  // kNext, kAhead, kNextRound: of all rounds, which follow each other
  // What the order had next; the number of its scopes at its end. Those from it to `scope` are left out.
  int expected = 0;
  std::string_view reason = {};  // kRefused: what follows the scope's name in a Status
};

class OrderProgress {
 public:
  enum class State : uint8_t { kToCome, kOpen, kClosed, kLeftOut };

  // `round`: the scopes of one, which outlive this. `trainable`: by unit, whether it has a gradient.
  void BeginStep(std::span<const PlannedScope> round, const std::vector<bool>& trainable,
                 int rounds);
  // An evaluation's: any number of walks.
  void BeginWalks(std::span<const PlannedScope> walk);

  Match Open(ScopeKind kind, int unit);
  void Close(int scope);  // Match::scope, once for each Open
  // The trainer opens nothing more. Returns the first scope that is left out, or their number: none.
  int LeaveOutRest();

  // Of scopes of rounds that Release gave back: kClosed.
  State state(int scope) const {
    if (scope >= left_out_from_) return State::kLeftOut;
    const int at = scope - first_round_ * per_round();
    if (at < 0) return State::kClosed;
    return at < std::ssize(states_) ? states_[static_cast<size_t>(at)] : State::kToCome;
  }
  bool has_come(int scope) const { return state(scope) != State::kToCome; }
  bool is_over(int scope) const {
    return state(scope) == State::kClosed || state(scope) == State::kLeftOut;
  }
  // Nothing asks any more for the state of scopes of rounds before this one, so that they take no memory.
  void Release(int round) { released_round_ = round; }
  int scopes() const { return rounds_ * per_round(); }
  int next() const { return next_; }    // what the order has next; scopes(): nothing
  int round() const { return round_; }  // of the newest scope
  // Between rounds, with nothing open: an evaluation may come.
  bool at_seam() const {
    return open_ == 0 && next_ > 0 && next_ < scopes() && next_ % per_round() == 0;
  }
  uint64_t hash() const { return hash_; }  // of what was opened, in its order

 private:
  int per_round() const { return static_cast<int>(scopes_.size()); }
  const PlannedScope& ScopeOf(int scope) const {
    return scopes_[static_cast<size_t>(scope % per_round())];
  }
  void Begin(std::span<const PlannedScope> scopes, int rounds);
  void StartWalk();
  Match Find(ScopeKind kind, int unit);
  int FindFrom(int begin, int end, ScopeKind kind, int unit) const;  // -1: none
  bool MayStartNextRound(int unit) const;
  std::string_view WhyNoBackward(int unit) const;
  std::string_view WhyNotInRound(int scope) const;
  void LeaveOut(int end);
  void MakeRoom(int scope);
  void Set(int scope, State state) {
    states_[static_cast<size_t>(scope - first_round_ * per_round())] = state;
  }
  void Take(int scope);

  std::span<const PlannedScope> scopes_;
  const std::vector<bool>* trainable_ = nullptr;  // null: walks
  // Of the rounds from `first_round_` on that have begun, or are in the room that there is.
  std::vector<State> states_;
  int rounds_ = 1, first_round_ = 0, released_round_ = 0;
  int left_out_from_ = 0;  // scopes() where nothing is at the end
  int next_ = 0, round_ = 0;
  int open_ = 0;  // scopes of any kind
  // Of the round of `round_`: a Backward came; behind it, a Forward that is none of the order.
  bool backward_begun_ = false, recomputed_ = false;
  uint64_t hash_ = 0;
};

}  // namespace ebb::sharding
