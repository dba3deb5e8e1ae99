#include "ebb/sharding/report/step_clock.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb::sharding {
namespace {

bool IsAmount(double value) {
  return value >= 0 && std::isfinite(value);
}

absl::StatusOr<MachineCost> CostOn(const Amounts& rates, const Cost& cost, Role role) {
  const auto error = [&](auto... what) {
    return absl::InvalidArgumentError(
        absl::StrCat("the cost of '", std::string(Name(role)), "' ", what...));
  };
  for (const double seconds : {cost.caller_seconds, cost.latency, cost.seconds})
    if (!IsAmount(seconds)) return error("has a time of ", seconds, " seconds");
  MachineCost made{.caller_seconds = cost.caller_seconds,
                   .latency = cost.latency,
                   .alone = cost.seconds,
                   .amounts = cost.amounts};
  for (int r = 0; r < kResources; ++r) {
    const auto resource = static_cast<Resource>(r);
    const double amount = cost.amounts[resource];
    if (amount == 0) continue;
    if (!IsAmount(amount) || !IsAmount(rates[resource]) || rates[resource] == 0) {
      return error("takes ", amount, " of '", std::string(Name(resource)), "', of which there is ",
                   rates[resource], " a second");
    }
    made.alone = std::max(made.alone, amount / rates[resource]);
  }
  for (int r = 0; r < kResources && made.alone > 0; ++r) {
    const auto resource = static_cast<Resource>(r);
    made.demand[resource] = cost.amounts[resource] / made.alone;
  }
  return made;
}

}  // namespace

absl::Status StepClock::Add(const OpList& list) {
  ListCosts& of = of_.emplace_back();
  of.list = &list;
  of.repeats = std::min(list.again, again_most_);
  of.costs.reserve(list.ops.size());
  of.events.reserve(list.ops.size());
  for (size_t index = 0; index < list.ops.size(); ++index) {
    const Op& op = list.ops[index];
    EBB_ASSIGN_OR_RETURN(const MachineCost cost, CostOn(rates_, costs_.Of(op), op.role));
    of.costs.push_back(cost);
    std::array<int, 2>& events = of.events.emplace_back();
    events.fill(kNone);
    if (!list.waits[index].awaited) continue;
    events.fill(frontier_.AddEvent(op.ends));
    if (op.by_parity) events[1] = frontier_.AddEvent(op.ends);
  }
  newest_.assign(static_cast<size_t>(frontier_.events()), kNone);
  return absl::OkStatus();
}

void StepClock::RunCaller() {
  while (!CallerIsDone() && caller_.held_by == 0 && caller_.busy_until <= now_) {
    if (caller_.next == kNone) {
      BeginStep();
    } else if (caller_.next < Of(caller_.step).count()) {
      Issue();
    } else {
      EndStep();
    }
  }
}

// Two steps may be under way.
void StepClock::BeginStep() {
  first_.push_back(static_cast<int>(clocked_.size()));
  caller_.next = 0;
  for (int64_t pair = control_.sums(); pair < control_.walk_sums(); pair += 2) {
    frontier_.ForEachUse(static_cast<int>(pair) + caller_.step % 2,
                         [this](int event) { HoldCaller(newest_[event]); });
  }
}

void StepClock::Issue() {
  const ListCosts& of = Of(caller_.step);
  const auto index = static_cast<size_t>(of.At(caller_.next)),
             parity = static_cast<size_t>(caller_.step % 2);
  if (of.costs[index].caller_seconds > 0 && !std::exchange(caller_.took_time, true)) {
    caller_.busy_until = now_ + of.costs[index].caller_seconds;
    return;
  }
  caller_.took_time = false;
  ++caller_.next;
  const Op& op = of.list->ops[index];
  const Waits& waits = of.list->waits[index];
  const int number = static_cast<int>(clocked_.size());
  clocked_.push_back(
      {.step = caller_.step, .op = static_cast<int>(index), .begin_cause = caller_.cause});
  progress_.emplace_back();
  for (int wait : waits.on) {
    const int event = of.events[wait][parity];
    frontier_.Follow(op.starts, event);
    Await(number, newest_[event]);
  }
  frontier_.Enter(op.starts, waits.enters, static_cast<int>(parity),
                  [&](int event) { Await(number, newest_[event]); });
  const int event = of.events[index][parity];
  frontier_.Issue(op.starts, op.ends, event);
  if (event != kNone) {
    frontier_.Leave(waits.leaves, static_cast<int>(parity), event);
    newest_[event] = number;
  }
  starts_[op.starts].numbers.push_back(number);
  ends_[op.ends].numbers.push_back(number);
  Look(op.starts);
  if (costs_.caller_computes() && op.stream == StreamId::kCompute) HoldCaller(number);
}

void StepClock::EndStep() {
  if (costs_.caller_awaits_report() && !std::exchange(caller_.reports, true)) {
    for (int number = first_.back(); number < std::ssize(clocked_); ++number)
      if (OpOf(number).role == Role::kConclude) HoldCaller(number);
    return;
  }
  caller_.reports = false;
  caller_.next = kNone;
  ++caller_.step;
}

void StepClock::HoldCaller(int number) {
  Progress& of = ProgressOf(number);
  if (of.state == State::kOver || std::exchange(of.holds_caller, true)) return;
  ++caller_.held_by;
}

void StepClock::Await(int number, int other) {
  Progress& of = ProgressOf(other);
  if (of.state == State::kOver) return;
  waiters_.push_back({.number = number, .next = of.first_waiter});
  of.first_waiter = static_cast<int>(waiters_.size()) - 1;
  ++ProgressOf(number).awaited;
}

// Handles all events of this moment.
void StepClock::HandleEvents() {
  do {
    while (to_look_at_ != 0) {
      const uint32_t lines = std::exchange(to_look_at_, 0u);
      for (Line line = 0; line < kLines; ++line) {
        if ((lines >> line & 1u) == 0) continue;
        Start(line);
        Move(line);
      }
    }
    RunCaller();
  } while (to_look_at_ != 0);
}

// Transfers start after the transfer before them has started; other operations after the one
// before them has ended.
void StepClock::Start(Line line) {
  Queue& queue = starts_[line];
  for (int number = queue.front(); number != kNone; number = queue.front()) {
    const Line ends = OpOf(number).ends;
    if (ProgressOf(number).awaited > 0 || (ends == line && ends_[line].front() != number)) return;
    ClockedOp& clocked = At(number);
    ++queue.head;
    if (const int behind = queue.front();
        ends != line && behind != kNone && ProgressOf(behind).awaited == 0)
      At(behind).begin_cause = clocked.begin_cause;
    clocked.begin = clocked.since = now_;
    clocked.cause = clocked.begin_cause;
    const double latency = CostOf(clocked).latency;
    ProgressOf(number).state = latency > 0 ? State::kStarted : State::kReady;
    if (latency > 0) answers_.emplace(now_ + latency, number);
    Look(ends);
  }
}

void StepClock::Move(Line line) {
  const int number = ends_[line].front();
  if (number == kNone || ProgressOf(number).state != State::kReady) return;
  ProgressOf(number).state = State::kMoving;
  const double alone = CostOf(At(number)).alone;
  if (alone == 0) return End(number);
  moving_.push_back({.number = number, .left = alone});
  shares_stand_ = false;
}

void StepClock::End(int number) {
  Progress& of = ProgressOf(number);
  of.state = State::kOver;
  At(number).end = now_;
  const Line line = OpOf(number).ends;
  ++ends_[line].head;
  Look(line);
  if (const int behind = ends_[line].front(); behind != kNone) {
    const Progress& other = ProgressOf(behind);
    if (other.state == State::kIssued) {
      if (OpOf(behind).starts == line && other.awaited == 0) At(behind).begin_cause = number;
    } else if (other.state == State::kReady) {  // a transfer
      At(behind).since = now_;
      At(behind).cause = number;
    }
  }
  for (int waiter = of.first_waiter; waiter != kNone;) {
    const Waiter& waits = waiters_[waiter];
    At(waits.number).begin_cause = number;
    if (--ProgressOf(waits.number).awaited == 0) Look(OpOf(waits.number).starts);
    waiter = waits.next;
  }
  if (of.holds_caller && --caller_.held_by == 0) caller_.cause = number;
}

double StepClock::NextEvent() {
  if (!std::exchange(shares_stand_, true)) {
    shares_.clear();
    for (const Moving& each : moving_)
      shares_.push_back({.demand = CostOf(At(each.number)).demand});
    ShareRates(rates_, shares_);
  }
  double next = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < moving_.size(); ++i)
    next = std::min(next, now_ + moving_[i].left / shares_[i].speed);
  if (!answers_.empty()) next = std::min(next, answers_.top().first);
  if (!CallerIsDone() && caller_.held_by == 0) next = std::min(next, caller_.busy_until);
  return next;
}

void StepClock::Advance(double to) {
  const double passed = to - now_;
  over_.clear();
  size_t kept = 0;
  for (size_t i = 0; i < moving_.size(); ++i) {
    Moving each = moving_[i];
    At(each.number).limited[shares_[i].limit] += passed;
    if (now_ + each.left / shares_[i].speed <= to) {
      over_.push_back(each.number);
      continue;
    }
    each.left -= passed * shares_[i].speed;
    moving_[kept] = each;
    shares_[kept++] = shares_[i];
  }
  moving_.resize(kept);
  shares_.resize(kept);
  now_ = to;
  for (; !answers_.empty() && answers_.top().first <= now_; answers_.pop()) {
    const int number = answers_.top().second;
    ProgressOf(number).state = State::kReady;
    Look(OpOf(number).ends);
  }
  if (!over_.empty()) shares_stand_ = false;
  for (int number : over_) End(number);
}

absl::Status StepClock::Run() {
  size_t count = 0;
  for (int step = 0; step < steps_; ++step) count += static_cast<size_t>(Of(step).count());
  clocked_.reserve(count);
  progress_.reserve(count);
  for (HandleEvents();; HandleEvents()) {
    const double next = NextEvent();
    if (!std::isfinite(next)) break;
    Advance(next);
  }
  if (!CallerIsDone() || std::any_of(progress_.begin(), progress_.end(),
                                     [](const Progress& of) { return of.state != State::kOver; }))
    return absl::InternalError("the simulation stands still: operations wait for each other");
  return absl::OkStatus();
}

}  // namespace ebb::sharding
