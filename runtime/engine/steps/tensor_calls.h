// The collectives of TensorAxis, on the compute stream. Their bytes are the step's, and they have spans
// in its timeline.
#pragma once

#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/comm/call_kind.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/issue/step_timeline.h"
#include "ebb/runtime/engine/ranks/step_communicators.h"
#include "ebb/runtime/engine/steps/list_runner.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/runtime/engine/tensor_view.h"

namespace ebb {

class TensorCalls {
 public:
  TensorCalls(const Core& core, StepCommunicators& peers, const StepProgress& progress,
              ListRunner& runner, StepTimeline& timeline)
      : core_(core), peers_(peers), progress_(progress), runner_(runner), timeline_(timeline) {}

  int rank() const;
  int size() const;
  void AllReduce(MutableTensorView values, ReduceOp op);
  void AllGather(TensorView block, MutableTensorView blocks);
  void ReduceScatter(TensorView blocks, MutableTensorView block);

 private:
  Communicator* Find() const;  // null: one rank
  // `call`: enqueues the collective of the span. `fits`: of its views.
  void Run(CallKind kind, const absl::Status& fits, const CollectiveSpan& span,
           absl::FunctionRef<absl::Status(Communicator&, Stream&)> call);
  // The unit of the trainer's whose scope was opened last; "": none is open.
  std::string_view OpenUnit() const;
  // One rank: from one view to the other.
  void Copy(const TensorView& from, const MutableTensorView& to);

  const Core& core_;
  StepCommunicators& peers_;
  const StepProgress& progress_;
  ListRunner& runner_;
  StepTimeline& timeline_;
  // The last call's. It has run, or NCCL has taken it, when the call returns.
  CollectiveSpan span_;
};

}  // namespace ebb
