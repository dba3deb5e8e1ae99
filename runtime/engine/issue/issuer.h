// Runs a list's operations. Each waits for its events, does one of a few things with its
// operands, and leaves an event. The operation says what to do, where and when; the issuer only
// decides how a code is done.
#pragma once

#include <array>
#include <functional>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "ebb/offload/swap_verifier.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/cpu/cpu_event.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/issue/linked_list.h"
#include "ebb/runtime/engine/issue/moved_bytes.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/kernels_by_stream.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/ranks/step_communicators.h"
#include "ebb/runtime/engine/updates/update_call.h"
#include "ebb/sharding/op_list.h"

namespace ebb {

class Issuer {
 public:
  Issuer(const Core& core, const ControlBlock& control, SwapVerifier& verifier,
         const UpdateCall& updates, StepOutcome& outcome, StepCommunicators& peers)
      : core_(core),
        control_(control),
        verifier_(verifier),
        updates_(updates),
        outcome_(outcome),
        peers_(peers) {}

  // A task of the host: it enqueues its work on the stream.
  using HostTask = std::function<void(const LinkedList& list, int op, int parity, Stream& stream)>;
  void OnHost(sharding::Role role, HostTask task) {
    tasks_[static_cast<int>(role)] = std::move(task);
  }

  // Operations [begin, end), but not scopes' kernels, which the trainer enqueues (StartKernels).
  void Run(LinkedList& run, int begin, int end, const StepTag& step, MovedBytes* counted);
  // The operations of a state call may run at once: each starts behind all that used its memory.
  // `over`: an event for each operation.
  void StartNow(LinkedList& run, std::span<Event> over);
  // Waits for the operations; returns the first error.
  absl::Status AwaitNow(LinkedList& run, std::span<Event> over);
  // StartNow and AwaitNow for reads of a save, on its own thread. Memory of these reads is ordered
  // by Role::kSave alone. `copies`: null if there are none.
  void StartOfSave(LinkedList& run, Stream* copies);
  absl::Status AwaitOfSave(LinkedList& run, Stream* copies);

 private:
  Stream& At(sharding::Line line) const { return core_.order.At(line); }
  void Issue(LinkedList& run, int op, const StepTag& step, MovedBytes* counted);
  void Work(LinkedList& run, int op, const StepTag& step, Stream& stream);
  void Redistribute(LinkedList& run, int op, const StepTag& step, Stream& stream);
  void Transfer(LinkedList& run, int op, const StepTag& step, Stream& stream);
  void Copy(LinkedList& run, int op, int parity, Stream& stream);
  std::span<std::byte> MemoryOf(const LinkedList& run, int op, int operand, int parity) const;
  ShardFile& FileOf(const LinkedList& run, const sharding::Place& place) const;
  void StartTransfers(LinkedList& run, int op, uint32_t save);
  void EndTransfers(LinkedList& run, int op, const StepTag& step);
  // Calls kernels: at once if they enqueue themselves, else in a task of `stream`.
  template <class Kernels>
  void Enqueue(Stream& stream, Kernels kernels) const {
    if (core_.kernels.Enqueue(stream)) {
      kernels();
    } else {
      stream.Enqueue(kernels);
    }
  }
  // Conversions, sums of gradients, their norms, updates, in such a task.
  void Calculate(const LinkedList& run, int op, const StepTag& step, Stream& stream) const;
  void Convert(const LinkedList& run, int op, int part, Stream& stream) const;
  void Accumulate(const LinkedList& run, int op, int part, Stream& stream) const;
  void Norm(const LinkedList& run, int op, int part, Stream& stream) const;

  const Core& core_;
  const ControlBlock& control_;
  SwapVerifier& verifier_;
  const UpdateCall& updates_;
  StepOutcome& outcome_;
  StepCommunicators& peers_;
  std::array<HostTask, sharding::kRoles> tasks_;  // by role
  // By the line where transfers start: how many have. The line where they end waits for that
  // number, which costs no event.
  std::array<Tickets, sharding::kLines> started_;
};

}  // namespace ebb
