// The outcome of a step, from its first scope to its report, as a state machine of two slots by
// parity. An evaluation may run within a step, so it has a slot of its own.
//
//   Free -Begin-> Begun -Close-> Sealed -Conclude-> Judged -Report, or the second Begin-> Free
//                  \-Drop-> Free
//
//   Begin, Close, Finish, Report ...   by the calling thread
//   Prepare, Seal, Conclude            host tasks in the order of the reduce stream: as a step with
//                                      early updates begins, and around the exchange of records
//
// The device and later steps follow the results of Conclude (TrainingProgress, StepConstants). So
// the calling thread may be two steps ahead of the verdicts that it knows. The thread takes a
// verdict when a call asks for it; Begin takes the verdict of the step before the last. The verdict
// is the same on all ranks. Callers may hear of an error at different times, so TrainingProgress
// holds steps back until all know.
//
// The machine knows nothing of storage and plans, and of other ranks only records and StepPeers.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/exchange.h"
#include "ebb/runtime/engine/outcome/outcome_messages.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/outcome/step_peers.h"
#include "ebb/runtime/engine/outcome/step_scalars.h"
#include "ebb/runtime/engine/outcome/training_progress.h"

namespace ebb {

class StepOutcome {
 public:
  enum class State : uint8_t { kFree, kBegun, kSealed, kJudged };

  // `backwards`: as ebb::Conclude. `ranks`: complete before the first step.
  StepOutcome(const Config& config, StepErrors& errors, StepPeers& peers, ControlBlock& control,
              StepConstants& constants, OutcomeMessages& messages,
              const std::vector<int>& backwards, const VerdictRanks& ranks);
  // Logs the last step's error if no call has returned it.
  ~StepOutcome();

  // Takes the verdicts of the steps before: all of them before an evaluation, and else all but the
  // last. Then a step or an evaluation is open. While an evaluation within a step is open, the
  // calls below are about the evaluation. Returns its parity: the slot that was free.
  int Begin(bool evaluation);
  // The first half of Begin, for waits on the slot before Begin writes to it. Returns its parity.
  int FreeSlot(bool evaluation);
  // An early update of the open step comes next: its updates have started, unless it is blocked.
  void StartEarlyUpdate();
  // Whether an update may run; any thread. An early update uses the errors that are known by now.
  bool MayUpdate(int parity, bool early) const;

  // A rank's knowledge of its step when the exchange of records is enqueued.
  struct Closing {
    StepTerms terms = {};  // without the results of the exchange
    uint64_t scopes_hash = 0;
    const ScopeTrail* trail = nullptr;       // of a step
    const Evaluation::Sums* sums = nullptr;  // of an evaluation
    std::span<const int64_t> log = {};
    bool adds_loss = false;
  };
  void Close(const Closing& closing);

  // Constants of early updates, behind the verdict of the step before.
  void Prepare(int parity, std::optional<double> learning_rate);
  // Writes this rank's record before the all-gather, with what only the stream knows.
  void Seal(int parity);
  // Runs after the all-gather. `exchanged`: the result of the all-gather.
  void Conclude(int parity, const absl::Status& exchanged);

  // Ends the open step. Returns this rank's own error, or the verdict if the step waits for it.
  absl::Status Finish();
  absl::StatusOr<Evaluation::Sums> FinishEvaluation();
  // The error of another call of all ranks, after its exchange.
  absl::Status ErrorOfCall(std::span<const int64_t> log, const Verdict& ranks);
  // Ends the open step or evaluation without a result.
  void Drop();
  // Waits for the verdicts of all finished steps but the last `untaken_max`.
  void Take(int untaken_max = 0);
  // For calls that read or change the state: an error comes before the state it has left.
  absl::Status AwaitVerdicts() {
    Take();
    return errors_.Report();
  }
  // The report of the last finished step. Waits for its verdict.
  absl::StatusOr<StepReport> Report();

  // The failure of a communicator or the device, with where the step or call of `log` has met it.
  absl::Status Located(const absl::Status& broken, std::span<const int64_t> log) const;
  absl::Status Broken(std::span<const int64_t> log) const { return Located(peers_.Broken(), log); }
  StepRates& rates() { return constants_.rates(); }

  int last_parity() const { return last_; }  // of the last finished step; any thread
  int64_t exchange(int parity) const { return slots_[parity].terms.exchange; }
  State state(int parity) const { return slots_[parity].state; }
  // Counts every step without a taken verdict as a success, except for the errors of this rank.
  int64_t finished_steps() const;
  // No step has finished or failed since the engine was made or its training state was set.
  bool has_nothing_to_report() const { return !report_.ok() && last_failure_.ok(); }

  // Between steps, after all verdicts were taken.
  TrainingState training_state() const { return training_.state(); }
  void SetTrainingState(const TrainingState& state);

 private:
  // Facts of a step, of an evaluation, or of another call of all ranks.
  struct Known {
    const absl::Status& error;  // this rank's
    std::span<const int64_t> log;
    const Verdict& ranks;  // of all records
    bool is_step = false;
    bool waits = false;     // its Finish waits for the verdict
    bool complete = false;  // all ranks' records have come
    int parity = 0;         // of the records
  };
  struct Slot {
    std::atomic<State> state = State::kFree;
    bool evaluation = false;
    bool updates_started = false;  // early ones, on this rank; when sealed: with an effect
    StepTerms terms = {};
    absl::Status error = {};        // this rank's
    std::vector<int64_t> log = {};  // as StepProgress has it
    // Results of Conclude.
    bool complete = false;  // all ranks' records have come
    Verdict ranks = {};
    Evaluation::Sums sums = {};  // an evaluation's
    Judgement judged = {};

    StepOutcome::Known Known(int parity) const {
      return {.error = error,
              .log = log,
              .ranks = ranks,
              .is_step = !evaluation,
              .waits = terms.waits,
              .complete = complete,
              .parity = parity};
    }
    bool IsUntaken() const {
      const State now = state;
      return !evaluation && (now == State::kSealed || now == State::kJudged);
    }
  };

  // The error of any rank, after the exchange; the same step fails on all of them. Before that, a
  // rank sends what only its own communicators know, so that no other rank waits for it. An error
  // beyond the step fails the engine.
  absl::Status ErrorOf(const Known& known);
  void EndOpen();
  void TakeOne(Slot& slot, int parity);

  const Config& config_;
  StepErrors& errors_;
  StepPeers& peers_;
  ControlBlock& control_;
  StepConstants& constants_;
  OutcomeMessages& messages_;
  const std::vector<int>& backwards_;
  const VerdictRanks& ranks_;
  TrainingProgress training_;
  Slot slots_[ControlBlock::kSlots];  // by parity
  std::optional<int> open_;           // the parity of the open step or evaluation
  std::optional<int> outer_;          // the parity of the step around an evaluation
  std::atomic<int> last_ = 1;
  int64_t finished_ = 0;       // steps with a taken verdict
  absl::Status last_failure_;  // of a step with a taken verdict
  absl::StatusOr<StepReport> report_ = absl::FailedPreconditionError("no step has finished yet");
};

}  // namespace ebb
