// Runs a fragment's instructions. Each waits for its events, does one of a few things with its
// operands, and leaves an event. The instruction says what to do, where and when; the issuer only
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
#include "ebb/runtime/engine/issue/linked_fragment.h"
#include "ebb/runtime/engine/issue/moved_bytes.h"
#include "ebb/runtime/engine/issue/record_exchange.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/kernels_by_stream.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/ranks/step_communicators.h"
#include "ebb/runtime/engine/updates/update_call.h"
#include "ebb/sharding/instructions.h"

namespace ebb {

class Issuer {
 public:
  Issuer(const Core& core, const ControlBlock& control, SwapVerifier& verifier,
         const UpdateCall& updates, RecordExchange& exchange, StepOutcome& outcome,
         StepCommunicators& peers)
      : core_(core),
        control_(control),
        verifier_(verifier),
        updates_(updates),
        exchange_(exchange),
        outcome_(outcome),
        peers_(peers) {}

  // The work of kReadAsync, on its stream.
  void OnReadAsync(std::function<void(int unit)> read) { read_async_ = std::move(read); }

  // Instructions [begin, end), but not scopes' kernels, which the trainer enqueues (StartKernels).
  void Run(LinkedFragment& run, int begin, int end, const StepTag& step, MovedBytes* counted);
  // The instructions of a state call may run at once: each starts behind all that used its memory.
  // `over`: an event for each instruction.
  void StartNow(LinkedFragment& run, std::span<Event> over);
  // Waits for the instructions; returns the first error.
  absl::Status AwaitNow(LinkedFragment& run, std::span<Event> over);
  // StartNow and AwaitNow for reads of a save, on its own thread. Memory of these reads is ordered
  // by kReadAsync alone. `copies`: null if there are none.
  void StartOfSave(LinkedFragment& run, Stream* copies);
  absl::Status AwaitOfSave(LinkedFragment& run, Stream* copies);

 private:
  Stream& At(sharding::Line line) const { return core_.order.At(line); }
  void Issue(LinkedFragment& run, int instruction, const StepTag& step, MovedBytes* counted);
  void Work(LinkedFragment& run, int instruction, const StepTag& step, Stream& stream);
  void Collect(LinkedFragment& run, int instruction, const StepTag& step, Stream& stream);
  void Copy(LinkedFragment& run, int instruction, int parity, Stream& stream);
  std::span<std::byte> MemoryOf(const LinkedFragment& run, int instruction, int operand,
                                int parity) const;
  ShardFile& FileOf(const LinkedFragment& run, const sharding::Place& place) const;
  void StartTransfers(LinkedFragment& run, int instruction, uint32_t save);
  void EndTransfers(LinkedFragment& run, int instruction, const StepTag& step);
  // Calls kernels: at once if they enqueue themselves, else in a task of `stream`.
  template <class Kernels>
  void Enqueue(Stream& stream, Kernels kernels) const {
    if (core_.kernels.Enqueue(stream)) {
      kernels();
    } else {
      stream.Enqueue(kernels);
    }
  }
  // Casts, sums of gradients, their norms, updates, in such a task.
  void Calculate(const LinkedFragment& run, int instruction, const StepTag& step,
                 Stream& stream) const;
  void Cast(const LinkedFragment& run, int instruction, int part, Stream& stream) const;
  void Accumulate(const LinkedFragment& run, int instruction, int part, Stream& stream) const;
  void Norm(const LinkedFragment& run, int instruction, int part, Stream& stream) const;

  const Core& core_;
  const ControlBlock& control_;
  SwapVerifier& verifier_;
  const UpdateCall& updates_;
  RecordExchange& exchange_;
  StepOutcome& outcome_;
  StepCommunicators& peers_;
  std::function<void(int unit)> read_async_;
  // By the line where transfers start: how many have. The line where they end waits for that
  // number, which costs no event.
  std::array<Tickets, sharding::kLines> started_;
};

}  // namespace ebb
