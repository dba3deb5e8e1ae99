#include "ebb/runtime/engine/steps/fragment_runner.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "ebb/runtime/engine/issue/issuer.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/waits.h"

namespace ebb {

StepTag FragmentRunner::Tag() const {
  const StepProgress& progress = *with_.progress;
  return {.trace = progress.trace,
          .finished = with_.outcome->finished_steps(),
          .parity = progress.parity,
          .counts = progress.alive && !progress.evaluation,
          .divide = static_cast<float>(1.0 / progress.gradients.divisor)};
}

// A rank that cannot link a fragment fails, and runs the config's own, which RunnablePlans::LinkOwn
// has linked, because the other ranks issue the step's collectives.
void FragmentRunner::Choose(Runnable& run) {
  StepProgress& progress = *with_.progress;
  absl::Status linked = with_.plans->Link(run, /*carrying=*/false);
  if (linked.ok() && carries_) linked = with_.plans->Link(run, /*carrying=*/true);
  if (!linked.ok()) with_.errors->Fail(linked);
  progress.run = linked.ok() ? &run : &with_.plans->own();
  progress.fragment = progress.run->linked[carries_ ? 1 : 0].get();
  progress.run->Predict(carries_, progress.rounds, moved_[progress.parity]);
}

void FragmentRunner::ChooseWalk() {
  with_.progress->run = &with_.plans->walk();
  with_.progress->fragment = with_.plans->walk().linked[0].get();
}

void FragmentRunner::ReserveSpans() const {
  const StepProgress& progress = *with_.progress;
  const sharding::Plan& plan = progress.plan();
  const int64_t operations =
      std::ssize(plan.operations) +
      (progress.rounds - sharding::PlannedRounds(plan)) * std::ssize(plan.MiddleRound());
  with_.timeline->Collect(progress.trace.shown ? operations : 0);
}

void FragmentRunner::Issue(int begin, int end) {
  const StepProgress& progress = *with_.progress;
  with_.issuer->Run(*progress.fragment, begin, end, Tag(),
                    progress.evaluation ? nullptr : &moved_[progress.parity]);
  if (after_carried_ == nullptr || progress.evaluation) return;
  const std::vector<sharding::Instruction>& all = progress.fragment->fragment().instructions;
  if (std::none_of(all.begin() + end, all.end(),
                   [](const sharding::Instruction& i) { return i.carried; }))
    CallAfterCarried();
}

void FragmentRunner::AfterCarried(std::function<void()> then) {
  after_carried_ = std::move(then);
  if (!carries_) CallAfterCarried();
}

void FragmentRunner::CallAfterCarried() {
  if (const auto then = std::exchange(after_carried_, nullptr)) then();
}

int FragmentRunner::issued() const {
  const StepProgress& progress = *with_.progress;
  return progress.moment < progress.moments() ? progress.MomentOf(progress.moment).begin
                                              : progress.fragment->fragment().moments.back().end;
}

bool FragmentRunner::UpdateHasStarted(int unit) const {
  for (int index = 0; index < issued(); ++index) {
    const sharding::Instruction& instruction = (*with_.progress->fragment)[index];
    if (instruction.code == sharding::Code::kUpdate && !instruction.carried &&
        instruction.parts.front().unit == unit)
      return true;
  }
  return false;
}

void FragmentRunner::StartKernels(int instruction) {
  with_.order->Await(*with_.progress->fragment, instruction, with_.progress->parity);
}

void FragmentRunner::EndKernels(int instruction) {
  with_.order->Leave(*with_.progress->fragment, instruction, with_.progress->parity);
}

void FragmentRunner::Drain() {
  if (!carries_) return;
  carries_ = false;
  with_.timeline->Collect(std::ssize(with_.plans->drain().plan.operations));
  LinkedFragment& drain = *with_.plans->drain().linked[1];
  StepTag step = Tag();
  step.parity = 1 - with_.outcome->last_parity();
  step.counts = false;
  with_.issuer->Run(drain, 0, static_cast<int>(drain.fragment().instructions.size()), step,
                    /*counted=*/nullptr);
  CallAfterCarried();
}

void FragmentRunner::IssueCarriedLeft() {
  const StepProgress& progress = *with_.progress;
  if (!carries_ || progress.evaluation) return;
  carries_ = false;
  IssueBehindFences(sharding::FindCarried(progress.fragment->fragment(), issued()));
}

void FragmentRunner::FinishCarried() {
  if (!carries_) return;
  IssueCarriedLeft();
  with_.progress->fragment = with_.progress->run->linked[0].get();  // of Choose
}

void FragmentRunner::BringUpToDate() {
  StepProgress& progress = *with_.progress;
  if (progress.is_up_to_date) return;
  progress.is_up_to_date = true;
  if (!sharding::HasCarriedFrom(progress.plan(), progress.MomentInPlan(progress.moment))) return;
  FinishCarried();
  BringAgain();
}

absl::Status FragmentRunner::MayLook() const {
  if (!carries_ || !with_.progress->alive || with_.progress->evaluation) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this step still has to run updates of the step before, because parameters on NVMe are "
      "updated just before their use: ask for state between steps, or after Step::Reduce");
}

void FragmentRunner::AwaitState() {
  Drain();
  with_.order->WaitIdle();
}

void FragmentRunner::BringAgain() {
  IssueBehindFences(sharding::FindToBringAgain(with_.plans->cells(),
                                               with_.progress->fragment->fragment(), issued()));
  with_.order->Fence();
}

void FragmentRunner::IssueBehindFences(const std::vector<int>& instructions) {
  for (const int index : instructions) {
    with_.order->Fence();
    Issue(index, index + 1);
  }
}

std::vector<CommunicationRow> FragmentRunner::communication() const {
  return moved_[with_.outcome->last_parity()].Communication();
}

std::vector<TrafficRow> FragmentRunner::traffic() const {
  if (!has_finished_) return {};
  return moved_[with_.outcome->last_parity()].Traffic();
}

}  // namespace ebb
