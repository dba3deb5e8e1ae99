#include "ebb/sharding/order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::order_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Call {
  enum Kind { kForward, kBackward, kRecompute, kClose } kind{};
  int unit = 0;  // kClose: of the open scopes, in the order they were opened
};

ScopeKind KindOf(const Call& call) {
  return static_cast<ScopeKind>(call.kind);
}

struct SmallModel {
  const char* name;
  std::vector<int> forward;     // units
  std::vector<bool> trainable;  // by unit
  int rounds;                   // 0: walks of an evaluation
  int length;                   // of the sequences that are tried
  std::vector<ScopeEvent> order = {};
};

std::vector<PlannedScope> ScopesOf(const SmallModel& model) {
  ModelSpec spec = UnitChain(std::vector<int64_t>(model.trainable.size(), 1));
  for (size_t unit = 0; unit < model.trainable.size(); ++unit)
    spec.parameters[unit].trainable = model.trainable[unit];
  spec.forward.clear();
  for (int unit : model.forward) spec.forward.push_back({.unit = UnitId{unit}});
  spec.order = model.order;
  EXPECT_OK(Validate(spec));
  return model.rounds == 0 ? ScopesOfWalk(spec) : ScopesOfStep(spec, 1);
}

// The meaning of a sequence of calls, worked out anew from all that came before: `taken` holds the
// scopes of the order that were opened, by round and place.
class Specification {
 public:
  Specification(const SmallModel& model, bool may_leave_out)
      : model_(model), order_(ScopesOf(model)), may_leave_out_(may_leave_out) {}

  Match Open(ScopeKind asked, int unit) {
    const bool backward = asked == ScopeKind::kBackward;
    const int n = std::ssize(order_), rounds = std::max(1, model_.rounds);
    int next = taken_.empty() ? 0 : taken_.back() + 1;
    Match match;
    match.expected = next;
    ++open_;
    const int round = next / n;  // the round of the coming scopes
    const auto is = [&](int s) {
      const ScopeKind declared = order_[s % n].backward    ? ScopeKind::kBackward
                                 : order_[s % n].recompute ? ScopeKind::kRecompute
                                                           : ScopeKind::kForward;
      return declared == asked && order_[s % n].unit == unit;
    };
    const auto first = [&](int from, int to) {
      while (from < to && !is(from)) ++from;
      return from < to ? from : -1;
    };
    const auto take = [&](Match::Kind kind, int scope) {
      taken_.push_back(scope);
      if (scope / n != round_) recomputed_ = false;
      round_ = scope / n;
      match.kind = kind;
      match.scope = scope;
      return match;
    };
    const auto opened = [&](int s) { return std::count(taken_.begin(), taken_.end(), s) > 0; };
    // If backwards may be left out, then of several visits of a unit, those whose forward came have
    // backwards and recomputes. But the forward of a visit may be within its backward, if it is
    // declared directly before it and does not go on with visits of the same unit.
    const auto forward_came = [&](int s) {
      return std::any_of(taken_.begin(), taken_.end(), [&](int t) {
        return t / n == s / n && !order_[t % n].backward && !order_[t % n].recompute &&
               order_[t % n].visit == order_[s % n].visit;
      });
    };
    const auto is_within = [&](int s) {
      if (!order_[s % n].backward || s % n == 0 || s == next) return false;
      const PlannedScope& before = order_[(s - 1) % n];
      const bool goes_on = next % n > 0 && !order_[(next - 1) % n].backward &&
                           !order_[(next - 1) % n].recompute && order_[(next - 1) % n].unit == unit;
      return !before.backward && !before.recompute && before.visit == order_[s % n].visit &&
             !goes_on;
    };
    const auto first_in_round = [&] {
      const bool looks = may_leave_out_ && asked != ScopeKind::kForward;
      for (int s = next; looks && s < (round + 1) * n; ++s)
        if (is(s) && (forward_came(s) || is_within(s))) return s;
      return first(next, (round + 1) * n);
    };

    // 1. Scopes that are still to come in the round.
    if (round < rounds) {
      if (const int s = first_in_round(); s >= 0) {
        if (backward && round > 0) {
          // But for a round that has nothing or one Forward where the round before lacks this
          // backward.
          const auto forwards = std::count_if(taken_.begin(), taken_.end(), [&](int t) {
            return t / n == round && !order_[t % n].backward && !order_[t % n].recompute;
          });
          if ((next == round * n || forwards == 1) && !opened(s - n)) return match;
        }
        return take(s == next ? Match::kNext : Match::kAhead, s);
      }
    }
    // 2. A walk starts over when nothing is open.
    if (model_.rounds == 0) {
      if (open_ == 1 && next > 0 && first(0, n) >= 0) {
        taken_.clear();
        match.expected = 0;
        return take(Match::kNextRound, first(0, n));
      }
      match.kind = Match::kAgain;
      return match;
    }
    // 3. A gradient has one place. A unit without one is shown.
    if (backward) {
      if (!model_.trainable[unit]) match.kind = Match::kAgain;
      return match;
    }
    // A recompute is of this round, or none of the order.
    if (asked == ScopeKind::kRecompute) {
      match.kind = Match::kAgain;
      return match;
    }
    // 4. A Forward starts the next round if this round's backward has begun and is over for its
    // unit, or if the unit is the round's first and nothing was recomputed.
    const bool begun = std::any_of(taken_.begin(), taken_.end(),
                                   [&](int t) { return t / n == round && order_[t % n].backward; });
    bool to_come = false;
    for (int s = next; s < (round + 1) * n; ++s)
      to_come |= order_[s % n].backward && order_[s % n].unit == unit;
    if (begun && round + 1 < rounds &&
        (!to_come || (unit == order_.front().unit && !recomputed_)) &&
        first((round + 1) * n, (round + 2) * n) >= 0)
      return take(Match::kNextRound, first((round + 1) * n, (round + 2) * n));
    // 5. Else it is shown again.
    const bool backward_of_newest = std::any_of(taken_.begin(), taken_.end(), [&](int t) {
      return t / n == round_ && order_[t % n].backward;
    });
    recomputed_ |= backward_of_newest;
    match.kind = Match::kAgain;
    return match;
  }
  void Close() { --open_; }

  bool at_seam() const {
    const int n = std::ssize(order_), next = taken_.empty() ? 0 : taken_.back() + 1;
    return open_ == 0 && next % n == 0 && next / n > 0 && next / n < model_.rounds;
  }
  const std::vector<int>& taken() const { return taken_; }
  int round() const { return round_; }

 private:
  const SmallModel& model_;
  const std::vector<PlannedScope> order_;
  const bool may_leave_out_;
  std::vector<int> taken_;
  int open_ = 0, round_ = 0;
  bool recomputed_ = false;
};

std::string Written(const std::vector<Call>& calls) {
  std::string text;
  for (const Call& call : calls)
    absl::StrAppend(&text,
                    call.kind == Call::kForward     ? " F"
                    : call.kind == Call::kBackward  ? " B"
                    : call.kind == Call::kRecompute ? " R"
                                                    : " close ",
                    call.unit);
  return text;
}

class Comparison {
 public:
  Comparison(const SmallModel& model, bool may_leave_out)
      : model_(model), order_(ScopesOf(model)), may_leave_out_(may_leave_out) {}

  // Runs the calls on both; false where they disagree.
  void Run(const std::vector<Call>& calls) {
    Specification right(model_, may_leave_out_);
    if (model_.rounds == 0) {
      progress_.BeginWalks(order_);
    } else {
      progress_.BeginStep(order_, model_.trainable, model_.rounds, may_leave_out_);
    }
    std::vector<int> open;
    std::vector<bool> closed(static_cast<size_t>(progress_.scopes()), false);
    for (const Call& call : calls) {
      if (call.kind == Call::kClose) {
        const int scope = open[static_cast<size_t>(call.unit)];
        open.erase(open.begin() + call.unit);
        progress_.Close(scope);
        right.Close();
        if (scope >= 0) closed[static_cast<size_t>(scope)] = true;
      } else {
        const Match match = progress_.Open(KindOf(call), call.unit);
        const Match expected = right.Open(KindOf(call), call.unit);
        ASSERT_EQ(match.kind, expected.kind) << Written(calls);
        ASSERT_EQ(match.scope, expected.scope) << Written(calls);
        ASSERT_EQ(match.expected, expected.expected) << Written(calls);
        ASSERT_EQ(match.reason.empty(), match.kind != Match::kRefused) << Written(calls);
        if (match.kind == Match::kNextRound && model_.rounds == 0)
          std::fill(closed.begin(), closed.end(), false);
        open.push_back(match.scope);
        kinds_[match.kind]++;
      }
    }
    ASSERT_EQ(progress_.at_seam(), right.at_seam()) << Written(calls);
    ASSERT_EQ(progress_.round(), right.round()) << Written(calls);
    const std::vector<int>& taken = right.taken();
    for (int s = 0; s < progress_.scopes(); ++s) {
      const bool came = std::count(taken.begin(), taken.end(), s) > 0;
      const auto state = !came && (taken.empty() || s > taken.back())
                             ? OrderProgress::State::kToCome
                         : !came                          ? OrderProgress::State::kLeftOut
                         : closed[static_cast<size_t>(s)] ? OrderProgress::State::kClosed
                                                          : OrderProgress::State::kOpen;
      ASSERT_EQ(progress_.state(s), state) << Written(calls) << ", scope " << s;
    }
  }

  // All sequences of the model's length: each comes with all that it begins with.
  void RunAll() {
    std::vector<Call> calls;
    Extend(calls, /*open=*/0);
  }
  int kinds(Match::Kind kind) const { return kinds_[kind]; }
  int sequences() const { return sequences_; }

 private:
  void Extend(std::vector<Call>& calls, int open) {
    Run(calls);
    if (::testing::Test::HasFatalFailure()) return;
    ++sequences_;
    if (std::ssize(calls) == model_.length) return;
    const auto extend = [&](Call call, int then_open) {
      calls.push_back(call);
      Extend(calls, then_open);
      calls.pop_back();
    };
    for (int unit = 0; unit < std::ssize(model_.trainable); ++unit) {
      extend({Call::kForward, unit}, open + 1);
      if (model_.rounds > 0) extend({Call::kBackward, unit}, open + 1);
      if (!model_.order.empty()) extend({Call::kRecompute, unit}, open + 1);
      if (::testing::Test::HasFatalFailure()) return;
    }
    if (open > 0) extend({Call::kClose, 0}, open - 1);
    if (open > 1) extend({Call::kClose, open - 1}, open - 1);
  }

  const SmallModel& model_;
  const std::vector<PlannedScope> order_;
  const bool may_leave_out_;
  OrderProgress
      progress_;  // one for all orders: an order that begins anew has forgotten everything
  int kinds_[5] = {};
  int sequences_ = 0;
};

constexpr ScopeEvent F(int visit, bool opens = true) {
  return {.opens = opens, .visit = visit};
}
constexpr ScopeEvent B(int visit, bool opens = true) {
  return {.opens = opens, .backward = true, .visit = visit};
}
constexpr ScopeEvent R(int visit, bool opens = true) {
  return {.opens = opens, .recompute = true, .visit = visit};
}

// Each closes before the next opens.
std::vector<ScopeEvent> InTurn(const std::vector<ScopeEvent>& scopes) {
  ModelSpec model;
  for (const ScopeEvent& scope : scopes) model.AddScope(scope);
  return model.order;
}

const SmallModel kModels[] = {
    {"OneUnit", {0}, {true}, 1, 8},
    {"OneUnitInThreeRounds", {0}, {true}, 3, 9},
    {"TwoUnits", {0, 1}, {true, true}, 1, 6},
    {"TwoUnitsInTwoRounds", {0, 1}, {true, true}, 2, 7},
    {"ThreeUnitsInTwoRounds", {0, 1, 2}, {true, true, true}, 2, 5},
    {"TiedEnds", {0, 1, 0}, {true, true}, 2, 7},
    {"FrozenMiddle", {0, 1, 2}, {true, false, true}, 2, 5},
    {"FrozenStart", {0, 1}, {false, true}, 2, 7},
    {"OneUnitVisitedThreeTimes", {0, 0, 0}, {true}, 2, 9},
    {"ALoopBeforeAHead", {0, 0, 0, 1}, {true, true}, 2, 6},
    {"ALoopOfTwoUnits", {0, 1, 0, 1}, {true, true}, 1, 6},
    {"ALoopWithRecomputes", {0, 0}, {true}, 2, 7, InTurn({F(0), F(1), R(1), B(1), R(0), B(0)})},
    {"ARootOverItsBlock",
     {0, 1},
     {true, true},
     2,
     6,
     {F(0), F(1), F(1, false), F(0, false), B(0), B(1), B(1, false), B(0, false)}},
    {"ASegment", {0, 1}, {true, true}, 2, 6, InTurn({F(0), F(1), R(0), R(1), B(1), B(0)})},
    {"TwoWalks",
     {0, 1, 0, 1},
     {true, true},
     1,
     6,
     InTurn({F(0), F(1), B(1), B(0), F(2), F(3), B(3), B(2)})},
    {"BackwardInForwardsOrder", {0, 1}, {true, true}, 2, 6, InTurn({F(0), F(1), B(0), B(1)})},
    {"Walks", {0, 1, 2}, {true, true, true}, 0, 7},
    {"WalksOfTiedEnds", {0, 1, 0}, {true, true}, 0, 8},
};

class OrderTest : public ::testing::TestWithParam<SmallModel> {};
INSTANTIATE_TEST_SUITE_P(Models, OrderTest, ::testing::ValuesIn(kModels),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(OrderTest, EverySequenceOfCallsFollowsTheSpecification) {
  const std::vector<PlannedScope> order = ScopesOf(GetParam());
  const auto backwards = std::count_if(order.begin(), order.end(),
                                       [](const PlannedScope& scope) { return scope.backward; });
  for (const bool may_leave_out : {false, true}) {
    Comparison comparison(GetParam(), may_leave_out);
    comparison.RunAll();
    EXPECT_GT(comparison.sequences(), 500);
    EXPECT_GT(comparison.kinds(Match::kNext), 0);
    EXPECT_GT(comparison.kinds(Match::kAgain), 0);
    EXPECT_EQ(comparison.kinds(Match::kNextRound) > 0,
              GetParam().rounds == 0 || (GetParam().rounds > 1 && backwards > 1));
    EXPECT_EQ(comparison.kinds(Match::kRefused) > 0, GetParam().rounds > 0);
  }
}

TEST_P(OrderTest, ScopesOfTheDeclaredOrderAlwaysMatch) {
  const std::vector<PlannedScope> order = ScopesOf(GetParam());
  OrderProgress progress;
  const int rounds = std::max(1, GetParam().rounds);
  if (GetParam().rounds == 0) {
    progress.BeginWalks(order);
  } else {
    progress.BeginStep(order, GetParam().trainable, rounds);
  }
  for (int s = 0; s < rounds * std::ssize(order); ++s) {
    const PlannedScope& scope = order[static_cast<size_t>(s) % order.size()];
    EXPECT_EQ(progress.at_seam(), s > 0 && s % std::ssize(order) == 0);
    const Match match = progress.Open(scope.kind(), scope.unit);
    EXPECT_EQ(match.kind, Match::kNext);
    EXPECT_EQ(match.scope, s);
    EXPECT_EQ(match.expected, s);
    EXPECT_EQ(progress.round(), s / std::ssize(order));
    progress.Close(s);
  }
  EXPECT_FALSE(progress.at_seam());
  EXPECT_EQ(progress.LeaveOutRest(), progress.scopes());
}

// The rest of a declared loop is left out: its backwards are those of the passes that came.
TEST(OrderOfFewerVisitsTest, BackwardsBelongToTheForwardsThatCame) {
  struct Case {
    std::vector<int> forward;  // declared
    std::vector<Call> calls;
    std::vector<int> scopes;  // that they are, in the declared order
  };
  const auto f = [](int unit) { return Call{Call::kForward, unit}; };
  const auto b = [](int unit) { return Call{Call::kBackward, unit}; };
  const Case cases[] = {
      // F0 F1 F1 F1 F2 B2 B1 B1 B1 B0
      {{0, 1, 1, 1, 2}, {f(0), f(1), f(1), f(2), b(2), b(1), b(1), b(0)}, {0, 1, 2, 4, 5, 7, 8, 9}},
      {{0, 1, 1, 1, 2}, {f(0), f(1), f(2), b(2), b(1), b(0)}, {0, 1, 4, 5, 8, 9}},
      // The forward of the head is within its backward.
      {{0, 1, 1, 1, 2}, {f(0), f(1), f(1), b(2), b(1), b(1), b(0)}, {0, 1, 2, 5, 7, 8, 9}},
      // F0 F1 F1 F1 B1 B1 B1 B0: the loop comes last.
      {{0, 1, 1, 1}, {f(0), f(1), f(1), b(1), b(1), b(0)}, {0, 1, 2, 5, 6, 7}},
      // F0 F1 F2 F1 F2 F1 F2 B2 B1 B2 B1 B2 B1 B0: it ends after either of its units.
      {{0, 1, 2, 1, 2, 1, 2},
       {f(0), f(1), f(2), f(1), f(2), b(2), b(1), b(2), b(1), b(0)},
       {0, 1, 2, 3, 4, 9, 10, 11, 12, 13}},
      {{0, 1, 2, 1, 2, 1, 2},
       {f(0), f(1), f(2), f(1), b(1), b(2), b(1), b(0)},
       {0, 1, 2, 3, 10, 11, 12, 13}},
      // F0 F1 F1 F0 B0 B1 B1 B0: the tied head's forward is within its backward.
      {{0, 1, 1, 0}, {f(0), f(1), b(0), b(1), b(0)}, {0, 1, 4, 6, 7}},
  };
  for (const Case& one : cases) {
    const int units = *std::max_element(one.forward.begin(), one.forward.end()) + 1;
    const SmallModel model{"", one.forward, std::vector<bool>(static_cast<size_t>(units), true), 1,
                           0};
    const std::vector<PlannedScope> order = ScopesOf(model);
    OrderProgress progress;
    progress.BeginStep(order, model.trainable, model.rounds, /*may_leave_out=*/true);
    std::vector<int> scopes;
    for (const Call& call : one.calls) {
      scopes.push_back(progress.Open(KindOf(call), call.unit).scope);
      progress.Close(scopes.back());
    }
    EXPECT_EQ(scopes, one.scopes) << Written(one.calls);
  }
}

// Every refusal names what declares the order.
TEST(OrderRefusalTest, SaysWhy) {
  const SmallModel model{"", {0, 1, 2}, {true, true, true}, 2, 0};
  const std::vector<PlannedScope> order = ScopesOf(model);
  const auto reason = [&](const std::vector<Call>& calls) {
    OrderProgress progress;
    progress.BeginStep(order, model.trainable, model.rounds);
    Match match;
    for (const Call& call : calls) {
      match = progress.Open(KindOf(call), call.unit);
      progress.Close(match.scope);
    }
    EXPECT_EQ(match.kind, Match::kRefused);
    EXPECT_THAT(std::string(match.reason), HasSubstr(kOrderDeclaredIn));
    return std::string(match.reason);
  };
  const auto f = [](int unit) { return Call{Call::kForward, unit}; };
  const auto b = [](int unit) { return Call{Call::kBackward, unit}; };
  EXPECT_THAT(reason({f(0), f(1), f(2), b(2), b(0), b(1)}),
              HasSubstr("was left out when a later scope was opened"));
  EXPECT_THAT(reason({f(0), f(1), f(2), b(1), b(2)}),
              HasSubstr("was left out when a later scope was opened"));
  EXPECT_THAT(reason({f(0), f(1), f(2), b(2), b(2)}), HasSubstr("came once more than declared"));
  EXPECT_THAT(reason({f(0), f(1), f(2), b(2), b(1), b(2)}),
              AllOf(HasSubstr("came once more than declared"), HasSubstr("the most visits")));
  EXPECT_THAT(reason({f(0), f(1), f(2), b(2), b(1), f(0), b(0)}),
              HasSubstr("recompute inside the BackwardScope"));
}

TEST(OrderHashTest, IsOfTheScopesInTheirOrder) {
  const SmallModel model{"", {0, 1}, {true, true}, 1, 0};
  const std::vector<PlannedScope> order = ScopesOf(model);
  const auto hash = [&](const std::vector<Call>& calls) {
    OrderProgress progress;
    progress.BeginStep(order, model.trainable, model.rounds);
    for (const Call& call : calls) progress.Open(KindOf(call), call.unit);
    return progress.hash();
  };
  const std::vector<Call> walk = {{Call::kForward, 0}, {Call::kForward, 1}};
  EXPECT_EQ(hash(walk), hash(walk));
  EXPECT_NE(hash(walk), hash({{Call::kForward, 1}, {Call::kForward, 0}}));
  EXPECT_NE(hash(walk), hash({{Call::kForward, 0}, {Call::kBackward, 1}}));
  EXPECT_NE(hash(walk), hash({{Call::kForward, 0}}));
}

TEST(OrderRestTest, IsLeftOutAtTheEnd) {
  const SmallModel model{"", {0, 1}, {true, true}, 2, 0};
  const std::vector<PlannedScope> order = ScopesOf(model);
  OrderProgress progress;
  progress.BeginStep(order, model.trainable, model.rounds);
  progress.Close(progress.Open(ScopeKind::kForward, 0).scope);
  EXPECT_EQ(progress.LeaveOutRest(), 1);
  EXPECT_EQ(progress.next(), progress.scopes());
  for (int s = 1; s < progress.scopes(); ++s)
    EXPECT_EQ(progress.state(s), OrderProgress::State::kLeftOut);
}

// Rounds that are over are forgotten, so that the rounds of a step take no memory.
TEST(OrderProgress, RoundsThatAreReleasedAreClosed) {
  using State = OrderProgress::State;
  constexpr int kRounds = 64;
  const ModelSpec model = UnitChain({64, 64});
  const std::vector<PlannedScope> round = ScopesOfStep(model, 1);
  const std::vector<bool> trainable(2, true);
  OrderProgress progress;
  progress.BeginStep(round, trainable, kRounds);
  const int of_round = static_cast<int>(round.size());
  const int opened = 40 * of_round + 1;
  for (int s = 0; s < opened; ++s) {
    const PlannedScope& scope = round[static_cast<size_t>(s % of_round)];
    const Match match = progress.Open(scope.kind(), scope.unit);
    ASSERT_EQ(match.scope, s);
    progress.Release(s / of_round);
    if (s + 1 < opened) progress.Close(s);
  }
  for (int s = 0; s < progress.scopes(); ++s) {
    const State expected = s + 1 < opened    ? State::kClosed
                           : s + 1 == opened ? State::kOpen
                                             : State::kToCome;
    ASSERT_EQ(progress.state(s), expected) << s;
  }
  progress.Close(opened - 1);
  EXPECT_EQ(progress.LeaveOutRest(), opened);
  for (int s = opened; s < progress.scopes(); ++s) ASSERT_EQ(progress.state(s), State::kLeftOut);
}

}  // namespace
}  // namespace ebb::sharding::order_test
