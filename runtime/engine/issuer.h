// Runs a fragment's instructions: each waits for what it says, does one of a few things with the operands that
// it names, and leaves an event. What to do, where and when is all in the instruction; what is decided here is
// only how a code is done.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/instruction_arithmetic.h"
#include "ebb/runtime/engine/issue_observer.h"
#include "ebb/runtime/engine/linked_fragment.h"
#include "ebb/runtime/engine/moved_bytes.h"
#include "ebb/runtime/engine/record_exchange.h"
#include "ebb/runtime/engine/step_communicators.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/storage.h"
#include "ebb/runtime/engine/swap_verifier.h"
#include "ebb/sharding/frontier.h"
#include "ebb/sharding/instructions.h"
#include "ebb/sharding/waits.h"

namespace ebb {

class Issuer {
 public:
  struct Parts {                                         // borrowed
    std::array<Stream*, sharding::kLines> streams = {};  // null: no instruction runs there
    std::array<std::optional<Communicator>*, sharding::kLanes> lanes = {};  // by sharding::Lane
    Storage* storage = nullptr;
    Event* started = nullptr;  // ties the streams on which transfers start and end
    SwapVerifier* verifier = nullptr;
    const InstructionArithmetic* arithmetic = nullptr;
    RecordExchange* exchange = nullptr;
    StepOutcome* outcome = nullptr;
    StepErrors* errors = nullptr;
    StepCommunicators* peers = nullptr;
  };
  // `cells` outlive this.
  Issuer(const Parts& parts, const sharding::Cells& cells, int units)
      : with_(parts), cells_(cells), control_(units), frontier_(cells.count()) {}
  absl::Status MakeFence(const Device& device);
  // A stream that there was none of so far.
  void UseStream(sharding::Line line, Stream& stream) { with_.streams[line] = &stream; }
  // What kReadAsync does, on its stream.
  void OnReadAsync(std::function<void(int unit)> read) { read_async_ = std::move(read); }

  sharding::Frontier& frontier() { return frontier_; }
  std::vector<Event*>& events() { return events_; }
  void Observe(IssueObserver& observer) { observers_.push_back(&observer); }
  void Note(IssueObserver::CallerTouch touch, int parity) {
    for (IssueObserver* observer : observers_) observer->Touch(touch, parity);
  }

  // Instructions [begin, end), whose kernels are left to StartKernels and EndKernels if they are a scope's.
  void Run(LinkedFragment& run, int begin, int end, const StepTag& step, MovedBytes* counted);
  // What the compute stream runs from now on finds what the kernels need; it has run.
  void StartKernels(LinkedFragment& run, int instruction, const StepTag& step);
  void EndKernels(LinkedFragment& run, int instruction, const StepTag& step);
  // Of a call for state, whose instructions may run at once: starts them behind all that used what they touch.
  // `over`: an event for each.
  void StartNow(LinkedFragment& run, std::span<Event> over);
  // Waits until they are over; the first error.
  absl::Status AwaitNow(LinkedFragment& run, std::span<Event> over);
  // Every stream comes after all that was issued on any. For what no fragment has.
  void Fence();
  // The fragment has ended early: what comes next waits for all that was issued, as far as it enters anything.
  void EndEarly();
  // The caller waits for what has used, of the control block, what is there by this parity.
  void AwaitParity(int parity);
  // The compute stream waits for what decides the loss scale.
  void AwaitScale();
  // The caller waits for all that was issued, or for all of steps and evaluations.
  void WaitIdle();
  void WaitForSteps();

 private:
  Stream& At(sharding::Line line) { return *with_.streams[line]; }
  void Await(LinkedFragment& run, int instruction, const StepTag& step);
  void Leave(LinkedFragment& run, int instruction, const StepTag& step);
  void Issue(LinkedFragment& run, int instruction, const StepTag& step, MovedBytes* counted);
  void Work(LinkedFragment& run, int instruction, const StepTag& step, Stream& stream);
  void Collect(LinkedFragment& run, int instruction, const StepTag& step, Stream& stream);
  void Copy(LinkedFragment& run, int instruction, Stream& stream);
  void StartTransfers(LinkedFragment& run, int instruction, uint32_t save);
  void EndTransfers(LinkedFragment& run, int instruction, const StepTag& step);

  Parts with_;
  std::function<void(int unit)> read_async_;
  const sharding::Cells& cells_;
  const sharding::ControlCells control_;
  sharding::Frontier frontier_;
  std::vector<Event> fence_;    // by line
  std::vector<int> floor_;      // likewise: its number in the frontier
  std::vector<Event*> events_;  // by their numbers in the frontier
  std::vector<IssueObserver*> observers_;
};

}  // namespace ebb
