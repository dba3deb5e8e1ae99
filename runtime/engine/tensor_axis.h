// The collectives of a trainer's kernels with the other tensor ranks of ebb.mesh, in layers that are
// cut over them (ParameterSpec::split). On the compute stream, usually while a scope is open:
//
//   ForwardScope scope = step.Forward(mlp);
//   Multiply(scope.parameter(up), x, hidden);        // this rank's block of rows
//   Multiply(scope.parameter(down), hidden, y);      // its block of columns: a term of the sum
//   engine.tensor().AllReduce(y);
//
// Sums are in rank order, with the same bits on every rank; over NCCL in NCCL's order, unless
// ebb.deterministic_reduce is on. Like scopes these calls never fail: the first error is the step's.
// All tensor ranks make the same calls in one order, with views of equal sizes. Of one rank each
// call does nothing, but for a copy where the two views are different memory.
#pragma once

#include "ebb/runtime/engine/tensor_view.h"
#include "ebb/runtime/kernels/reduce.h"

namespace ebb {

class TensorCalls;

class TensorAxis {
 public:
  TensorAxis() = default;  // of one rank, as of an engine that was moved from
  explicit TensorAxis(TensorCalls* calls) : calls_(calls) {}

  int rank() const;
  int size() const;
  void AllReduce(MutableTensorView values, ReduceOp op = ReduceOp::kSum) const;
  // `blocks`: those of all ranks, one behind the other.
  void AllGather(TensorView block, MutableTensorView blocks) const;
  // Rank r gets the sum of the r-th blocks.
  void ReduceScatter(TensorView blocks, MutableTensorView block) const;

 private:
  TensorCalls* calls_ = nullptr;  // the engine's, which outlives this
};

}  // namespace ebb
