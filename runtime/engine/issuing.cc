// The fragment that runs, as far as the trainer has come; and the updates that one step leaves to the next.
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/executor.h"

namespace ebb {

StepTag Executor::TagOf() const {
  return {.trace = progress_.trace,
          .finished = outcome_->finished_steps(),
          .parity = progress_.parity,
          .counts = progress_.alive && !progress_.evaluation,
          .divide = static_cast<float>(1.0 / progress_.divisor)};
}

void Executor::Issue(int begin, int end) {
  const bool counts = !progress_.evaluation;
  issuer_->Run(*progress_.fragment, begin, end, TagOf(),
               counts ? &moved_[progress_.parity] : nullptr);
}

int Executor::issued() const {
  const std::vector<sharding::FragmentMoment>& moments = progress_.fragment->fragment().moments;
  return progress_.moment < moments.size() ? moments[progress_.moment].begin : moments.back().end;
}

// Runs the updates that the last step left to the next one, for the call that looks first.
void Executor::Drain() {
  if (!carries_) return;
  carries_ = false;
  CollectSpans(drain_.get());
  LinkedFragment& drain = *drain_->linked[1];
  StepTag step = TagOf();
  step.parity = 1 - outcome_->last_parity();
  step.counts = false;
  issuer_->Run(drain, 0, static_cast<int>(drain.fragment().instructions.size()), step,
               /*counted=*/nullptr);
}

// Of a step that is dropped: the updates of the step before have their place ahead of its gathers. What waits for
// what is not issued any more is not known then: one after another.
void Executor::IssueCarriedLeft() {
  if (!carries_ || progress_.evaluation) return;
  carries_ = false;
  const int end = static_cast<int>(progress_.fragment->fragment().instructions.size());
  for (int index = issued(); index < end; ++index) {
    if (!(*progress_.fragment)[index].carried) continue;
    issuer_->Fence();
    Issue(index, index + 1);
  }
}

// State is not to be looked at between the updates that a step carries.
absl::Status Executor::MayLook() const {
  if (!carries_ || !progress_.alive || progress_.evaluation) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "state is asked for in a step that still has updates of the step before to do, as parameters "
      "on NVMe are updated just ahead of their use: ask between steps, or after Step::Reduce");
}

// Until all state is where it belongs, and nothing reads it there.
void Executor::AwaitState() {
  Drain();
  issuer_->WaitIdle();
}

}  // namespace ebb
