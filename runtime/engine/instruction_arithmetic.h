// Instructions that calculate: casts, sums of gradients, their norms, updates. By the kernels of the device on its
// streams, by the host's on the others.
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

  // What calls kernels: at once where those enqueue themselves, else as a task of `stream`.
  template <class Work>
  void Enqueue(Stream& stream, Work work) const {
    if (with_.kernels.Enqueue(stream)) {
      work();
    } else {
      stream.Enqueue(work);
    }
  }
  // Of all that is left to the default of Issuer. In such a task.
  void Run(const LinkedFragment& run, int instruction, const StepTag& step, Stream& stream) const;

 private:
  void Cast(const LinkedFragment& run, int instruction, int first, Stream& stream) const;
  void Accumulate(const LinkedFragment& run, int instruction, int part, Stream& stream) const;
  void Norm(const LinkedFragment& run, int instruction, int part, Stream& stream) const;

  const Parts with_;
};

}  // namespace ebb
