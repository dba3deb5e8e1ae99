// The update of one sub-group, on the stream of its tier, with the table's rules and options; and
// before LAMB and LARS the sums over its parameters. Decides whether the update happens, and calls
// an optimizer of the trainer's.
#pragma once

#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "ebb/offload/swap_verifier.h"
#include "ebb/optim/kernels.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/issue/linked_list.h"
#include "ebb/runtime/engine/issue/step_tag.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/outcome/step_scalars.h"
#include "ebb/runtime/engine/updates/own_optimizer.h"
#include "ebb/runtime/engine/updates/update_table.h"

namespace ebb {

class UpdateCall {
 public:
  // `own`: an optimizer of the trainer's; null: the config's.
  UpdateCall(const Core& core, const UpdateTable& table, const StepConstants& constants,
             const ControlBlock& control, const StepOutcome& outcome, SwapVerifier& verifier,
             const OwnOptimizer* own)
      : core_(core),
        table_(table),
        constants_(constants),
        control_(control),
        outcome_(outcome),
        verifier_(verifier),
        own_(own),
        own_enqueues_(OwnOptimizerEnqueues(core)) {}

  // Updates, both passes of Muon's and its iteration, and kParameterNorms; op.h lists operands.
  void Run(const LinkedList& run, int op, const StepTag& step, Stream& stream) const;
  bool own_enqueues() const { return own_enqueues_; }  // OwnOptimizerEnqueues

 private:
  // The arrays of one sub-group.
  struct Work {
    const sharding::UpdateDetail& detail;
    int unit = 0, parity = 0;
    optim::UpdateArrays arrays;
    std::byte* master = nullptr;  // or its low half
    std::span<std::byte* const> states = {};
    bool is_momentum = false;  // the first of Muon's two passes
  };
  // The part that one rule updates, with its constants: runs are counted from `first_set`.
  struct Part {
    optim::UpdateRule rule{};
    optim::UpdateArrays arrays;
    optim::UpdateRuns runs;
    int64_t first_set = 0;
  };

  Work WorkOf(const LinkedList& run, int op, const StepTag& step) const;
  void Update(const LinkedList& run, int op, const Work& of, Stream& stream) const;
  void Keep(const Work& of, Stream& stream) const;
  void Orthogonalise(const LinkedList& run, int op, Stream& stream) const;
  void SumNorms(const Work& of, std::span<optim::NormSums> sums, bool first, Stream& stream) const;
  void ForEachPart(const Work& of, const Stream& stream,
                   absl::FunctionRef<void(const Part&)> visit) const;
  std::span<const uint64_t> Checksums(const Work& of, Stream& stream) const;
  // The number of the first array that has a checksum here: 0 is the master.
  static int FirstArray(const Work& of) { return of.is_momentum ? 1 : 0; }
  bool Agrees(const Work& of, std::span<const uint64_t> checksums) const;

  const Core& core_;
  const UpdateTable& table_;
  const StepConstants& constants_;
  const ControlBlock& control_;
  const StepOutcome& outcome_;
  SwapVerifier& verifier_;
  const OwnOptimizer* const own_;
  const bool own_enqueues_;
};

}  // namespace ebb
