// Waits over whatever sequence of steps, evaluations and looks at the state an engine may run: they
// are enough, and none is too many. If a wait is left out, the first or the last rank misses it.
// Exceptions are waits for ranks in between, because a slice counts as those of all ranks
// (waits.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ebb/sharding/state_pieces.h"
#include "ebb/sharding/waits.h"
#include "order_check.h"
#include "random_model.h"

namespace ebb::sharding {
namespace {

// The programs of one engine: its steps of one, two and more rounds, held or not, its walk and its
// drain, each with and without carried updates.
class EnginePrograms {
 public:
  // `slice`: of the rank that reads state beside steps.
  explicit EnginePrograms(const RandomCase& random_case, int slice = 0) {
    const PlanInputs inputs = random_case.inputs();
    own_rounds_ = static_cast<int>(random_case.config.gradient_accumulation_steps /
                                   random_case.config.ebb.micro_batches_per_round);
    std::vector<Plan> cutting;  // those by which an engine cuts memory into cells
    cutting.push_back(*PlanStep(inputs));
    cutting.push_back(*PlanStep(inputs, /*rounds=*/0, /*hold_updates=*/true));
    cutting.push_back(*PlanWalk(inputs));
    cutting.push_back(*PlanDrain(inputs));
    decisions_ = cutting.front().decisions;
    carries_ = cutting.front().carries_updates;
    walk_ = Add(std::move(cutting[2]));
    drain_ = Add(std::move(cutting[3]));
    for (size_t i = 0; i < 2; ++i) steps_[{decisions_.rounds, i == 1}] = Add(std::move(cutting[i]));
    std::vector<const OpList*> all;
    for (const OpList& list : lists_) all.push_back(&list);
    cells_.emplace(all, plans_.front());
    for (const int rounds : {1, 2, 3}) {
      for (const bool holds : {false, true}) {
        if (own_rounds_ > 1 && !steps_.contains({rounds, holds}))
          steps_[{rounds, holds}] = Add(*PlanStep(inputs, rounds, holds));
      }
    }
    read_ = static_cast<int>(std::ssize(lists_));
    lists_.push_back(LowerAsyncRead(plans_.front(), slice, /*has_second_places=*/false));
    for (OpList& list : lists_) {
      DeriveWaits(*cells_, list);
      pointers_.push_back(&list);
    }
  }

  std::span<const OpList* const> lists() const { return pointers_; }
  const OpList& operator[](int list) const { return *pointers_[static_cast<size_t>(list)]; }
  const Decisions& decisions() const { return decisions_; }
  bool carries() const { return carries_; }
  const Cells& cells() const { return *cells_; }
  int own_rounds() const { return own_rounds_; }
  // By number; the same with updates of the step before is the next one.
  int walk() const { return walk_; }
  int drain() const { return drain_ + 1; }
  int read() const { return read_; }
  int Step(int rounds, bool holds) const {
    return steps_.at({std::min(rounds, kPlannedRounds), holds});
  }

 private:
  int Add(Plan plan) {
    const Plan& kept = plans_.emplace_back(std::move(plan));
    for (const bool carrying : {false, true}) lists_.push_back(ListOf(kept, carrying));
    return static_cast<int>(lists_.size()) - 2;
  }

  int own_rounds_ = 1;
  std::deque<Plan> plans_;
  std::deque<OpList> lists_;
  std::vector<const OpList*> pointers_;
  std::map<std::pair<int, bool>, int> steps_;  // by planned rounds, and whether it holds
  int walk_ = 0, drain_ = 0, read_ = 0;
  bool carries_ = false;
  Decisions decisions_;
  std::optional<Cells> cells_;
};

// Random calls of a trainer, and what the engine then issues. A seed gives one sequence.
class RandomTrainer {
 public:
  // `saves`: also reads state beside its steps.
  RandomTrainer(const EnginePrograms& programs, uint64_t seed, OrderCheck& check, bool saves)
      : programs_(programs), random_(seed), check_(check), saves_(saves) {}

  void Run(int calls) {
    for (int i = 0; i < calls && check_.complaint().empty(); ++i) {
      if (random_.OneIn(6)) {
        Evaluate();
      } else if (random_.OneIn(8)) {  // a call looks at the state
        Drain();
        check_.WaitIdle();
      } else if (saves_ && random_.OneIn(4)) {
        ReadAsync();
      } else {
        Step();
      }
    }
  }

 private:
  static constexpr int kSome =
      24;  // scopes: of so many one is opened again, or the last of a dropped step

  void Step() {
    const int rounds = programs_.own_rounds() == 1 ? 1 : random_.OneOf({1, 2, 3, 5});
    const bool holds = random_.OneIn(3),
               drops = (holds || programs_.decisions().timing != UpdateTiming::kEarly) &&
                       random_.OneIn(4);
    if (!programs_.carries()) Drain();
    list_ = programs_.Step(rounds, holds) + (carries_ ? 1 : 0);
    const auto moments = [this]() -> const std::vector<Moment>& {
      return programs_[list_].moments;
    };
    const size_t planned = static_cast<size_t>(std::min(rounds, kPlannedRounds)),
                 of_round = (moments().size() - 2) / planned;
    Issue(moments().front());
    for (int round = 0; round < rounds; ++round) {
      const size_t of_plan =
          round + 1 == rounds ? planned - 1 : std::min<size_t>(round, planned - 2);
      for (size_t m = 0; m < of_round; ++m) {
        const size_t at = 1 + of_plan * of_round + m;
        if (m == 0 && round > 0 && random_.OneIn(3)) EvaluateAtSeam(moments()[at].begin);
        if (drops && random_.OneIn(kSome)) return Drop(moments()[at].begin);
        Issue(moments()[at]);
        if (random_.OneIn(kSome)) OpenAgain();
      }
    }
    if (drops) return Drop(moments().back().begin);
    Issue(moments().back());
    carries_ = programs_.carries();
    parity_ = 1 - parity_;
  }
  void Issue(const Moment& moment) { check_.Run(list_, moment.begin, moment.end, parity_); }

  // The step's parity is free again.
  void Drop(int issued) {
    IssueCarriedLeft(issued);
    check_.WaitForSteps();
  }
  void IssueCarriedLeft(int issued) {
    if (!std::exchange(carries_, false)) return;
    RunBehindFences(FindCarried(programs_[list_], issued));
  }
  void RunBehindFences(const std::vector<int>& ops) {
    for (const int index : ops) {
      check_.Fence();
      check_.Run(list_, index, index + 1, parity_);
    }
  }
  // Runs the carried updates of the last step, with the other parity.
  void Drain() {
    if (!std::exchange(carries_, false)) return;
    const int size = static_cast<int>(programs_[programs_.drain()].ops.size());
    check_.Run(programs_.drain(), 0, size, parity_);
  }

  void ReadAsync() {
    check_.WaitForReads();
    Drain();
    const int size = static_cast<int>(programs_[programs_.read()].ops.size());
    check_.Run(programs_.read(), 0, size, /*parity=*/0);
  }

  void Evaluate() {
    Drain();
    Walk();
    if (!random_.OneIn(3)) return;
    check_.EndEarly();  // as another walk begins
    Walk();
  }
  void Walk() {
    const std::vector<Moment>& moments = programs_[programs_.walk()].moments;
    for (size_t m = 0; m < moments.size(); ++m) {
      check_.Run(programs_.walk(), moments[m].begin, moments[m].end, /*parity=*/0);
      if (m + 2 < moments.size() && random_.OneIn(kSome)) {
        const Moment& finish = moments.back();
        check_.Run(programs_.walk(), finish.begin, finish.end, /*parity=*/0);
        return check_.EndEarly();
      }
    }
  }
  void EvaluateAtSeam(int issued) {
    IssueCarriedLeft(issued);
    list_ -= list_ % 2;  // the rest of it without them
    check_.WaitForSteps();
    Walk();
    check_.WaitForSteps();
    RunBehindFences(FindToBringAgain(programs_.cells(), programs_[list_], issued));
    check_.Fence();
  }
  // A scope that is not in the order: its unit is gathered, and at its close the earlier unit is
  // gathered again.
  void OpenAgain() {
    ShowSomeUnit();
    ShowSomeUnit();
    check_.Fence();
  }
  void ShowSomeUnit() {
    std::vector<int> gathers;
    const std::vector<Op>& all = programs_[programs_.walk()].ops;
    for (int index = 0; index < std::ssize(all); ++index)
      if (FactsOf(all[static_cast<size_t>(index)].role).from == Spread::kSlice)
        gathers.push_back(index);
    check_.Fence();
    if (gathers.empty()) return;
    const auto chosen = static_cast<size_t>(random_.Between(0, std::ssize(gathers) - 1));
    check_.RunAlone(programs_.walk(), gathers[chosen]);
    check_.Fence();
  }

  const EnginePrograms& programs_;
  Random random_;
  OrderCheck& check_;
  const bool saves_;
  int list_ = 0;    // that the step runs
  int parity_ = 0;  // of the next step
  bool carries_ = false;
};

constexpr int kCalls = 8;

RandomCase CaseOf(int number) {
  return RandomCase(static_cast<uint64_t>((number + 1) / 2), /*offloads=*/number % 2 == 0,
                    /*orders=*/number % 3 == 0);
}

TEST(DerivedWaits, AreEnoughOverAnySequenceOfCalls) {
  for (int number = 1; number <= Cases(300); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    for (const int rank : {0, random_case.world - 1}) {
      const EnginePrograms programs(random_case, rank % random_case.shards());
      const RankTouches touches(programs.lists(), programs.decisions(), rank);
      OrderCheck check(programs.lists(), programs.cells(), touches);
      RandomTrainer(programs, random_case.seed, check, /*saves=*/true).Run(2 * kCalls);
      ASSERT_EQ(check.complaint(), "");
    }
  }
}

// Runs of one engine's programs, on the ranks of a shard group.
struct Runs {
  explicit Runs(const RandomCase& of) : random_case(of), programs(of) {
    for (int rank = 0; rank < of.shards(); ++rank)
      touches.emplace_back(programs.lists(), programs.decisions(), rank);
  }
  Runs(const Runs&) = delete;

  OrderCheck Run(size_t slice, std::optional<TakenWait> without = std::nullopt) const {
    OrderCheck check(programs.lists(), programs.cells(), touches[slice], without);
    RandomTrainer(programs, random_case.seed, check, /*saves=*/false).Run(kCalls);
    return check;
  }
  bool IsMissed(const TakenWait& wait, size_t slice) const {
    return !Run(slice, wait).complaint().empty();
  }

  const RandomCase& random_case;
  const EnginePrograms programs;
  std::vector<RankTouches> touches;  // of each slice
};

TEST(DerivedWaits, NineteenOfTwentyAreMissedOnTheFirstOrTheLastRank) {
  constexpr int64_t kTries = 4;  // of each kind
  struct Count {
    int taken = 0, missed = 0, missed_in_between = 0;
  };
  std::array<Count, 2> counts;  // within a list, through the frontier
  for (int number = 1; number <= Cases(120); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    const Runs runs(random_case);
    const OrderCheck all = runs.Run(0);
    ASSERT_EQ(all.complaint(), "");
    std::array<std::vector<TakenWait>, 2> waits;
    for (const TakenWait& wait : all.waits()) waits[wait.through_frontier ? 1 : 0].push_back(wait);
    Random random(random_case.seed);
    for (size_t kind : {0, 1}) {
      for (int64_t tries = std::min(kTries, std::ssize(waits[kind])); tries > 0; --tries) {
        const auto at = static_cast<size_t>(random.Between(0, std::ssize(waits[kind]) - 1));
        const TakenWait wait = std::exchange(waits[kind][at], waits[kind].back());
        waits[kind].pop_back();
        ++counts[kind].taken;
        if (runs.IsMissed(wait, 0) || runs.IsMissed(wait, runs.touches.size() - 1)) {
          ++counts[kind].missed;
          continue;
        }
        bool in_between = false;
        for (size_t slice = 1; slice + 1 < runs.touches.size() && !in_between; ++slice)
          in_between = runs.IsMissed(wait, slice);
        counts[kind].missed_in_between += in_between ? 1 : 0;
      }
    }
  }
  const char* const kKinds[] = {"within a list", "through the frontier"};
  for (size_t kind : {0, 1}) {
    const Count& count = counts[kind];
    std::printf(
        "waits %s: %d left out, %d missed on the first or the last rank, %d on others, "
        "%d on none\n",
        kKinds[kind], count.taken, count.missed, count.missed_in_between,
        count.taken - count.missed - count.missed_in_between);
    EXPECT_GE(count.missed, count.taken * 95 / 100) << kKinds[kind];
  }
}

// The record waits for losses, norms and files, and updates for the constants that follow from all
// records.
TEST(DerivedWaits, AllOfTheExchangeAreMissed) {
  int taken = 0;
  for (int number = 1; number <= Cases(12); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    const Runs runs(random_case);
    std::vector<Role> roles;
    for (const OpList* list : runs.programs.lists())
      for (const Op& each : list->ops) roles.push_back(each.role);
    const auto is_of_exchange = [&](int op) {
      using enum Role;
      const Role role = roles[static_cast<size_t>(op)];
      return role == kSeal || role == kExchange || role == kConclude || role == kCopyControl ||
             role == kSealNorms || role == kExchangeNorms || role == kConcludeNorms;
    };
    const OrderCheck all = runs.Run(0);
    for (const TakenWait& wait : all.waits()) {
      if (wait.through_frontier || !(is_of_exchange(wait.waiting) || is_of_exchange(wait.awaited)))
        continue;
      ++taken;
      EXPECT_TRUE(runs.IsMissed(wait, 0) || runs.IsMissed(wait, runs.touches.size() - 1))
          << Name(roles[static_cast<size_t>(wait.waiting)]) << " waits for "
          << Name(roles[static_cast<size_t>(wait.awaited)]);
    }
  }
  std::printf("waits of the exchange: %d left out\n", taken);
  EXPECT_GT(taken, 0);
}

}  // namespace
}  // namespace ebb::sharding
