#include "ebb/runtime/engine/steps/list_runner.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "ebb/runtime/engine/issue/issuer.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/waits.h"

namespace ebb {

StepTag ListRunner::Tag() const {
  return {.trace = progress_.trace,
          .finished = outcome_.finished_steps(),
          .parity = progress_.parity,
          .counts = progress_.alive && !progress_.evaluation,
          .divide = static_cast<float>(1.0 / progress_.gradients.divisor)};
}

// A rank that cannot link a list fails, and runs the config's own, which RunnablePlans::LinkOwn
// has linked, because the other ranks issue the step's collectives.
void ListRunner::Choose(Runnable& run) {
  absl::Status linked = core_.plans.Link(run, /*carrying=*/false);
  if (linked.ok() && carries_) linked = core_.plans.Link(run, /*carrying=*/true);
  if (!linked.ok()) core_.errors.Fail(linked);
  progress_.run = linked.ok() ? &run : &core_.plans.own();
  progress_.list = progress_.run->linked[carries_ ? 1 : 0].get();
  progress_.run->Predict(carries_, progress_.rounds, moved_[progress_.parity]);
}

void ListRunner::ChooseWalk() {
  progress_.run = &core_.plans.walk();
  progress_.list = core_.plans.walk().linked[0].get();
}

void ListRunner::ReserveSpans() const {
  const sharding::Plan& plan = progress_.plan();
  const int64_t operations = plan.Shown() + (progress_.rounds - sharding::PlannedRounds(plan)) *
                                                std::ssize(plan.MiddleRound());
  timeline_.Collect(progress_.trace.shown ? operations : 0);
}

void ListRunner::Issue(int begin, int end) {
  issuer_.Run(*progress_.list, begin, end, Tag(),
              progress_.evaluation ? nullptr : &moved_[progress_.parity]);
  if (after_carried_ == nullptr || progress_.evaluation) return;
  const std::vector<sharding::Op>& all = progress_.list->list().ops;
  if (std::none_of(all.begin() + end, all.end(), [](const sharding::Op& i) { return i.carried(); }))
    CallAfterCarried();
}

void ListRunner::AfterCarried(std::function<void()> then) {
  after_carried_ = std::move(then);
  if (!carries_) CallAfterCarried();
}

void ListRunner::CallAfterCarried() {
  if (const auto then = std::exchange(after_carried_, nullptr)) then();
}

int ListRunner::issued() const {
  return progress_.moment < progress_.moments() ? progress_.MomentOf(progress_.moment).begin
                                                : progress_.list->list().moments.back().end;
}

bool ListRunner::UpdateHasStarted(int unit) const {
  for (int index = 0; index < issued(); ++index) {
    const sharding::Op& op = (*progress_.list)[index];
    if (op.role == sharding::Role::kUpdate && !op.carried() && op.parts.front().unit == unit)
      return true;
  }
  return false;
}

void ListRunner::StartKernels(int op) {
  core_.order.Await(*progress_.list, op, progress_.parity);
}

void ListRunner::EndKernels(int op) {
  core_.order.Leave(*progress_.list, op, progress_.parity);
}

void ListRunner::CountOfKernels(int64_t bytes) {
  if (progress_.alive && !progress_.evaluation)
    moved_[progress_.parity].Add(sharding::Role::kScopes, bytes);
}

void ListRunner::Drain() {
  if (!carries_) return;
  carries_ = false;
  timeline_.Collect(std::ssize(core_.plans.drain().plan.ops));
  LinkedList& drain = *core_.plans.drain().linked[1];
  StepTag step = Tag();
  step.parity = 1 - outcome_.last_parity();
  step.counts = false;
  issuer_.Run(drain, 0, drain.size(), step,
              /*counted=*/nullptr);
  CallAfterCarried();
}

void ListRunner::IssueCarriedLeft() {
  if (!carries_ || progress_.evaluation) return;
  carries_ = false;
  IssueBehindFences(sharding::FindCarried(progress_.list->list(), issued()));
}

void ListRunner::FinishCarried() {
  if (!carries_) return;
  IssueCarriedLeft();
  progress_.list = progress_.run->linked[0].get();  // of Choose
}

void ListRunner::BringUpToDate() {
  if (progress_.is_up_to_date) return;
  progress_.is_up_to_date = true;
  if (!sharding::HasCarriedFrom(progress_.plan(), progress_.MomentInPlan(progress_.moment))) return;
  FinishCarried();
  BringAgain();
}

absl::Status ListRunner::MayLook() const {
  if (!carries_ || !progress_.alive || progress_.evaluation) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this step still has to run updates of the step before, because parameters on NVMe are "
      "updated just before their use: ask for state between steps, or after Step::Reduce");
}

void ListRunner::AwaitState() {
  Drain();
  core_.order.WaitIdle();
}

void ListRunner::BringAgain() {
  IssueBehindFences(
      sharding::FindToBringAgain(core_.plans.cells(), progress_.list->list(), issued()));
  core_.order.Fence();
}

void ListRunner::IssueBehindFences(const std::vector<int>& ops) {
  for (const int index : ops) {
    core_.order.Fence();
    Issue(index, index + 1);
  }
}

std::vector<CommunicationRow> ListRunner::communication() const {
  return moved_[outcome_.last_parity()].Communication();
}

std::vector<TrafficRow> ListRunner::traffic() const {
  if (!has_finished_) return {};
  return moved_[outcome_.last_parity()].Traffic();
}

}  // namespace ebb
