#include "ebb/sharding/order.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace ebb::sharding {
namespace {

// The current round, its neighbours, and one more, so that finished rounds are dropped once in two
// rounds.
constexpr int kRoundsKept = 4;
constexpr uint64_t kHashBasis = 0xcbf29ce484222325ull, kHashPrime = 0x100000001b3ull;  // FNV-1a

std::string_view LeftOutBefore() {
  static const std::string& reason = *new std::string(
      absl::StrCat("was left out when a later scope was opened, and its gradient has its place "
                   "before that: open scopes in the order of the model, or declare that in which "
                   "they come (",
                   kOrderDeclaredIn, ")"));
  return reason;
}

std::string_view CameBefore() {
  static const std::string& reason = *new std::string(
      absl::StrCat("came once more than declared, and its gradient has been reduced: declare the "
                   "most visits that a round may have (ModelSpec::forward, ",
                   kOrderDeclaredIn, ") and leave out the rest"));
  return reason;
}

std::string_view TakenForRound() {
  static const std::string& reason = *new std::string(
      absl::StrCat("follows a Forward that was taken for the start of the next round, before which "
                   "this Backward was left out: recompute inside the BackwardScope, which has the "
                   "parameters too, or with Step::Recompute (",
                   kOrderDeclaredIn, " declares what a round has)"));
  return reason;
}

}  // namespace

void OrderProgress::BeginStep(std::span<const PlannedScope> round,
                              const std::vector<bool>& trainable, int rounds, bool may_leave_out) {
  trainable_ = &trainable;
  may_leave_out_ = may_leave_out;
  Begin(round, rounds);
}

void OrderProgress::BeginWalks(std::span<const PlannedScope> walk) {
  trainable_ = nullptr;
  may_leave_out_ = false;
  Begin(walk, /*rounds=*/1);
}

void OrderProgress::Begin(std::span<const PlannedScope> scopes, int rounds) {
  scopes_ = scopes;
  rounds_ = rounds;
  states_.assign(scopes.size() * static_cast<size_t>(std::min(rounds, kRoundsKept)),
                 State::kToCome);
  first_round_ = released_round_ = 0;
  left_out_from_ = rounds * per_round();
  next_ = round_ = open_ = 0;
  backward_begun_ = recomputed_ = false;
  hash_ = kHashBasis;
}

void OrderProgress::StartWalk() {
  std::fill(states_.begin(), states_.end(), State::kToCome);
  left_out_from_ = per_round();
  next_ = 0;
}

Match OrderProgress::Open(ScopeKind kind, int unit) {
  hash_ = (hash_ ^ static_cast<uint64_t>(ScopeCode(kind, unit))) * kHashPrime;
  Match match = Find(kind, unit);
  match.expected = next_;
  if (match.scope >= 0) {
    Take(match.scope);
  } else if (match.kind == Match::kAgain && kind == ScopeKind::kForward && backward_begun_) {
    recomputed_ = true;
  }
  ++open_;
  return match;
}

// After a complete round, the scope expected next is the first of the next round. A scope that the
// rest of the present round lacks is opened again, or it starts the round after.
Match OrderProgress::Find(ScopeKind kind, int unit) {
  const bool backward = kind == ScopeKind::kBackward;
  const int n = per_round();
  const int end = std::min(scopes(), (next_ / n + 1) * n);
  if (const int found = FindInRound(end, kind, unit); found >= 0) {
    const std::string_view reason = backward ? WhyNotInRound(found) : std::string_view();
    if (!reason.empty()) return {.reason = reason};
    return {.kind = found == next_ ? Match::kNext : Match::kAhead, .scope = found};
  }
  if (trainable_ == nullptr) {
    if (open_ > 0 || next_ == 0) return {.kind = Match::kAgain};
    const int found = FindFrom(0, n, kind, unit);
    if (found < 0) return {.kind = Match::kAgain};
    StartWalk();
    return {.kind = Match::kNextRound, .scope = found};
  }
  if (backward) {
    if (!(*trainable_)[unit]) return {.kind = Match::kAgain};
    return {.reason = WhyNoBackward(unit)};
  }
  if (kind == ScopeKind::kRecompute || !MayStartNextRound(unit)) return {.kind = Match::kAgain};
  const int found = FindFrom(end, end + n, kind, unit);
  if (found < 0) return {.kind = Match::kAgain};
  return {.kind = Match::kNextRound, .scope = found};
}

int OrderProgress::FindFrom(int begin, int end, ScopeKind kind, int unit) const {
  for (int s = begin; s < end; ++s)
    if (ScopeOf(s).kind() == kind && ScopeOf(s).unit == unit) return s;
  return -1;
}

// The rest of the round has a backward, or a recompute, for each declared visit. Visits whose
// Forward was left out are only taken if there is no other.
int OrderProgress::FindInRound(int end, ScopeKind kind, int unit) const {
  const int first = FindFrom(next_, end, kind, unit);
  if (kind == ScopeKind::kForward || !may_leave_out_) return first;
  for (int s = first; s >= 0; s = FindFrom(s + 1, end, kind, unit))
    if (ForwardHasCome(s) || IsForwardWithin(s)) return s;
  return first;
}

bool OrderProgress::ForwardHasCome(int scope) const {
  const int begin = scope / per_round() * per_round();
  for (int s = begin; s < next_; ++s)
    if (ScopeOf(s).kind() == ScopeKind::kForward && ScopeOf(s).visit == ScopeOf(scope).visit)
      return state(s) != State::kLeftOut;
  return false;
}

// Whether the trainer may run this visit's forward in its backward: the one follows the other in
// the order. If the scope opened last is an earlier Forward of the same unit, the visit was left
// out.
bool OrderProgress::IsForwardWithin(int scope) const {
  const int begin = scope / per_round() * per_round();
  if (scope <= std::max(begin, next_)) return false;
  const PlannedScope &backward = ScopeOf(scope), &before = ScopeOf(scope - 1);
  if (!backward.backward || before.backward || before.recompute || before.visit != backward.visit)
    return false;
  return next_ == begin || ScopeOf(next_ - 1).kind() != ScopeKind::kForward ||
         ScopeOf(next_ - 1).unit != backward.unit;
}

// After the backward of a round has begun, a Forward belongs to the next round. If the unit's own
// backward is still to come, the Forward is a recompute in a scope of its own. For the first unit
// both are possible: it is a recompute if the scopes before it were.
bool OrderProgress::MayStartNextRound(int unit) const {
  const int n = per_round(), end = (next_ / n + 1) * n;
  if (!backward_begun_ || next_ % n == 0 || end >= scopes()) return false;
  if (unit == scopes_.front().unit && !recomputed_) return true;
  return FindFrom(next_, end, ScopeKind::kBackward, unit) < 0;
}

std::string_view OrderProgress::WhyNoBackward(int unit) const {
  const int n = per_round(), begin = (next_ - 1) / n * n;
  for (int s = begin; s < next_; ++s)
    if (ScopeOf(s).backward && ScopeOf(s).unit == unit && state(s) == State::kLeftOut)
      return LeftOutBefore();
  return CameBefore();
}

// A backward belongs to the round before if that round lacks it and the backward's own round has
// seen nothing yet, or one Forward only. Empty: it belongs to its own round.
std::string_view OrderProgress::WhyNotInRound(int scope) const {
  const int n = per_round(), begin = scope / n * n;
  int forwards = 0;
  bool missing = false;
  for (int s = std::max(0, begin - n); s < next_; ++s) {
    const PlannedScope& other = ScopeOf(s);
    if (s >= begin && other.kind() == ScopeKind::kForward && state(s) != State::kLeftOut)
      ++forwards;
    missing |= s < begin && other.backward && other.visit == ScopeOf(scope).visit &&
               state(s) == State::kLeftOut;
  }
  if (!missing) return {};
  return next_ == begin ? LeftOutBefore() : forwards == 1 ? TakenForRound() : std::string_view();
}

void OrderProgress::LeaveOut(int end) {
  for (int scope = next_; scope < end; ++scope) Set(scope, State::kLeftOut);
  next_ = end;
}

// States of older rounds are dropped. A round keeps its states until the round after it is over,
// and until it is released.
void OrderProgress::MakeRoom(int scope) {
  const int round = scope / per_round(), kept = std::max(0, std::min(round - 1, released_round_));
  if (kept > first_round_ && round - first_round_ >= kRoundsKept) {
    const auto over = static_cast<size_t>(
        std::min(std::ssize(states_), std::ptrdiff_t{kept - first_round_} * per_round()));
    std::fill(std::move(states_.begin() + static_cast<std::ptrdiff_t>(over), states_.end(),
                        states_.begin()),
              states_.end(), State::kToCome);
    first_round_ = kept;
  }
  const auto needed = static_cast<size_t>((round + 1 - first_round_) * per_round());
  if (states_.size() < needed) states_.resize(needed, State::kToCome);
}

void OrderProgress::Take(int scope) {
  MakeRoom(scope);
  LeaveOut(scope);
  Set(scope, State::kOpen);
  next_ = scope + 1;
  if (const int round = scope / per_round(); round != round_) {
    round_ = round;
    backward_begun_ = recomputed_ = false;
  }
  backward_begun_ |= ScopeOf(scope).backward;
}

void OrderProgress::Close(int scope) {
  if (scope >= 0) Set(scope, State::kClosed);
  --open_;
}

int OrderProgress::LeaveOutRest() {
  const int first = next_;
  left_out_from_ = next_;
  next_ = scopes();
  return first;
}

}  // namespace ebb::sharding
