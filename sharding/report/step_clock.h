// The virtual clock of Simulate. It runs operations of several steps on a machine, and records
// when each began and ended and which wait was its last.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ebb/sharding/frontier.h"
#include "ebb/sharding/op_list.h"
#include "ebb/sharding/report/costs.h"
#include "ebb/sharding/waits.h"

namespace ebb::sharding {

// A cost on the machine that it is for.
struct MachineCost {
  double caller_seconds = 0, latency = 0;
  double alone = 0;  // seconds of its amounts
  Amounts amounts = {}, demand = {};
};

// One operation of one step.
struct ClockedOp {
  int step = 0, op = 0;
  double begin = 0, end = 0;
  double since = 0;  // its line is in use for this one alone
  // The last event before it began, and before `since`: the end of another operation, or the
  // caller's work after that. kNone: the beginning.
  static constexpr int kNone = -1;
  int begin_cause = kNone, cause = kNone;
  std::array<double, kResources + 1> limited = {};  // seconds, by Limit
};

class StepClock {
 public:
  // `again_most`: a list repeats its middle round at most so often.
  StepClock(const Cells& cells, const Costs& costs, int steps, int again_most)
      : control_(cells.control()),
        costs_(costs),
        rates_(costs.rates()),
        steps_(steps),
        again_most_(again_most),
        frontier_(cells.count()) {}

  absl::Status Add(
      const OpList& list);  // the list of the first step, then the one of all later steps
  absl::Status Run();

  // In the order in which they were issued; [first(n), first(n + 1)) are of step n.
  const std::vector<ClockedOp>& clocked() const { return clocked_; }
  int first(int step) const {
    return step == steps_ ? static_cast<int>(clocked_.size()) : first_[step];
  }
  const Op& OpOf(const ClockedOp& of) const { return Of(of.step).list->ops[of.op]; }
  const MachineCost& CostOf(const ClockedOp& of) const { return Of(of.step).costs[of.op]; }

 private:
  static constexpr int kNone = ClockedOp::kNone;
  struct ListCosts {
    const OpList* list = nullptr;
    std::vector<MachineCost> costs;
    std::vector<std::array<int, 2>> events;                             // by operation and parity
    int repeats = 0;                                                    // of the middle round
    int again() const { return repeats > 0 ? repeats * middle() : 0; }  // operations of those
    int middle() const { return list->round_begins[1] - list->round_begins[0]; }
    int count() const { return static_cast<int>(costs.size()) + again(); }
    // The operation that a step issues as this one of count().
    int At(int number) const {
      if (again() == 0 || number < list->round_begins[1]) return number;
      if (number >= list->round_begins[1] + again()) return number - again();
      return list->round_begins[0] + (number - list->round_begins[0]) % middle();
    }
  };
  // kReady: its latency is over; the operation before it on its line may still run.
  enum class State : uint8_t { kIssued, kStarted, kReady, kMoving, kOver };
  // State of a ClockedOp until it is over.
  struct Progress {
    State state = State::kIssued;
    bool holds_caller = false;
    int awaited = 0;           // number of its waits that are not over
    int first_waiter = kNone;  // of waiters_
  };
  struct Waiter {
    int number = kNone, next = kNone;
  };
  struct Queue {
    std::vector<int> numbers;
    size_t head = 0;
    int front() const { return head < numbers.size() ? numbers[head] : kNone; }
  };
  struct Moving {
    int number = kNone;
    double left = 0;  // seconds alone
  };

  struct Caller {
    int step = 0, next = kNone;  // of ListCosts::count(); kNone: it has not begun the step
    bool took_time = false;      // for the next one
    bool reports = false;
    double busy_until = 0;
    int held_by = 0;    // operations
    int cause = kNone;  // the last that it waited for
  };

  const ListCosts& Of(int step) const { return of_[step == 0 ? 0 : 1]; }
  ClockedOp& At(int number) { return clocked_[number]; }
  Progress& ProgressOf(int number) { return progress_[number]; }
  const Op& OpOf(int number) { return OpOf(At(number)); }

  // The caller, as far as its next wait.
  void RunCaller();
  void BeginStep();
  void Issue();
  void EndStep();
  void HoldCaller(int number);
  void Await(int number, int other);

  // Lines.
  void Look(Line line) { to_look_at_ |= 1u << line; }
  void HandleEvents();
  void Start(Line line);
  void Move(Line line);
  void End(int number);

  // Time.
  bool CallerIsDone() const { return caller_.step == steps_; }
  double NextEvent();
  void Advance(double to);

  const ControlCells control_;
  const Costs& costs_;
  const Amounts rates_;
  const int steps_, again_most_;
  std::vector<ListCosts> of_;
  Frontier frontier_;
  std::vector<int> newest_;  // by event: the operation that has recorded it

  double now_ = 0;
  std::vector<ClockedOp> clocked_;
  std::vector<Progress> progress_;
  std::vector<int> first_;  // by step
  std::vector<Waiter> waiters_;
  std::array<Queue, kLines> starts_,
      ends_;                 // operations that have not started, and not ended, on each line
  uint32_t to_look_at_ = 0;  // lines
  std::vector<Moving> moving_;
  std::vector<RunningShare> shares_;  // of what moves
  bool shares_stand_ = true;
  std::vector<int> over_;
  using Answer = std::pair<double, int>;  // when the latency of one is over
  std::priority_queue<Answer, std::vector<Answer>, std::greater<>> answers_;

  Caller caller_;
};

}  // namespace ebb::sharding
