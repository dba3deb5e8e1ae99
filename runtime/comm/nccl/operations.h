// Calls of communicator.h as calls of NCCL: one group for each operation.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/movement.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/kernels/stream_mover.h"

namespace ebb {

// Reductions over NCCL with sums in the order of communicator.h, whatever NCCL's version and
// algorithm: ranks send each other the inputs, and one kernel of ours sums them.
//
//   rank 1's send   [ for 0 | for 1 | for 2 ]     a group of sends and receives, a step at a time
//                         \      |      /
//   scratch         [ of 0  | of 1  | of 2  ]     every rank's input for rank 1's elements
//                             |
//   receive                [ sum ]                the kernel; of an all-reduce then sent to all
//
// A reduce-scatter moves the same bytes as NCCL's. A step may hold several small spans.
class OrderedSums {
 public:
  // A send or a receive.
  struct Message {
    const std::byte* send = nullptr;
    std::byte* receive = nullptr;
    int64_t bytes = 0;
    int peer = 0;
  };
  // Enqueues them as one group.
  using Exchange = absl::FunctionRef<absl::Status(std::span<const Message>)>;

  // Whether a communicator of so many ranks may use it.
  static absl::Status CheckScratch(std::span<const std::byte> scratch, int size);

  // `scratch`: borrowed.
  OrderedSums(int rank, int size, int reduction_group, std::span<std::byte> scratch);

  absl::Status Run(const Collective& call, Exchange exchange, StreamMover& mover);

 private:
  // Adds what this rank sends to `peer` in a step, and what it receives from it: at `to`, or if
  // that is null, in the memory of the call.
  void AddMessages(const Movement& movement, int64_t step, int peer, std::byte* to);
  // The bytes from one rank's inputs in the scratch to the next rank's.
  int64_t stride() const {
    return static_cast<int64_t>(scratch_.size()) / size_ / FlatSpans::kAlignment *
           FlatSpans::kAlignment;
  }

  const int rank_;
  const int size_;
  const int reduction_group_;
  const std::span<std::byte> scratch_;
  std::vector<Message> messages_;  // of a step; kept for its memory
};

// Refuses what communicator.h allows and NCCL's own operations cannot do.
absl::Status CheckForNccl(const Collective& call);

// The factor of a sum's inputs and the factor of the sum: their product is the scale. Inputs are
// scaled only if the sum might overflow otherwise, because NCCL uses symmetric kernels, sums inside
// the switch and PAT, for which memory is registered, only for its plain sum (2.28.9:
// sym_kernels.cc, register/coll_reg.cc, enqueue.cc). Neither factor rounds the scale: `inputs` is a
// power of two, and the sum is multiplied in fp32.
struct NcclScale {
  float inputs = 1;
  float sum = 1;
};
NcclScale ScaleFor(const Collective& call, int ranks);

struct NcclGroup {
  int rank = 0;
  int size = 1;
  void* barrier = nullptr;  // a byte of the device, for barriers
};

// Enqueues `call` on `stream`. `op`: the operator of its reduction.
ncclResult_t EnqueueGroup(const NcclLibrary& nccl, ncclComm_t comm, const NcclGroup& group,
                          const Collective& call, ncclRedOp_t op, cudaStream_t stream);

// Enqueues sends and receives, which move bytes.
ncclResult_t EnqueueMessages(const NcclLibrary& nccl, ncclComm_t comm,
                             std::span<const OrderedSums::Message> messages, cudaStream_t stream);

// Multiplies what the spans of `call` have received, `count` elements each.
void ScaleReceived(StreamMover& mover, const Collective& call, float factor);

// For a collective with this operation. Sums of scaled inputs need an operator of their own.
ncclRedOp_t PlainOp(ReduceOp op);

}  // namespace ebb
