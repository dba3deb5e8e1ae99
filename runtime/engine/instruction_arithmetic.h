// Instructions that calculate: casts, sums of gradients, their norms, updates. The device's kernels
// run them on its streams, the host's kernels on the others.
#pragma once

#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/control_block.h"
#include "ebb/runtime/engine/kernels_by_stream.h"
#include "ebb/runtime/engine/linked_fragment.h"
#include "ebb/runtime/engine/step_tag.h"
#include "ebb/runtime/engine/swap_verifier.h"
#include "ebb/runtime/engine/update_call.h"

namespace ebb {

class InstructionArithmetic {
 public:
  struct Parts {  // borrowed
    KernelsByStream kernels;
    ControlBlock* control = nullptr;
    SwapVerifier* verifier = nullptr;
    UpdateCall* updates = nullptr;
  };
  explicit InstructionArithmetic(const Parts& parts) : with_(parts) {}

  // Calls kernels: at once if they enqueue themselves, else in a task of `stream`.
  template <class Work>
  void Enqueue(Stream& stream, Work work) const {
    if (with_.kernels.Enqueue(stream)) {
      work();
    } else {
      stream.Enqueue(work);
    }
  }
  // Runs all that Issuer leaves to its default, in such a task.
  void Run(const LinkedFragment& run, int instruction, const StepTag& step, Stream& stream) const;

 private:
  void Cast(const LinkedFragment& run, int instruction, int first, Stream& stream) const;
  void Accumulate(const LinkedFragment& run, int instruction, int part, Stream& stream) const;
  void Norm(const LinkedFragment& run, int instruction, int part, Stream& stream) const;

  const Parts with_;
};

}  // namespace ebb
