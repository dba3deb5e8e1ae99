// Calls of communicator.h as calls of NCCL: one group for each operation.
#pragma once

#include <nccl.h>

#include <span>

#include "absl/status/status.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/nccl/ordered_sums.h"

namespace ebb {

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

// Sums of scaled inputs: an operator of NCCL's for one operation. Made before the operation, and
// destroyed once the operation's call has returned and is not in progress.
class NcclSum {
 public:
  // `inputs`: as in NcclScale. 1: no operator of its own.
  ncclResult_t Create(const NcclLibrary& nccl, ncclComm_t comm, float inputs);
  ncclResult_t Destroy(const NcclLibrary& nccl, ncclComm_t comm);
  ncclRedOp_t op() const { return op_; }

 private:
  ncclRedOp_t op_ = ncclSum;
};

struct NcclGroup {
  int rank = 0;
  int size = 1;
  void* barrier = nullptr;  // a byte of the device, for barriers
};

// Enqueues `call` on `stream`. `op`: the operator of its reduction.
ncclResult_t EnqueueGroup(const NcclLibrary& nccl, ncclComm_t comm, const NcclGroup& group,
                          const Collective& call, ncclRedOp_t op, cudaStream_t stream);

// The same for sends and receives; they move bytes.
ncclResult_t EnqueueMessages(const NcclLibrary& nccl, ncclComm_t comm,
                             std::span<const OrderedSums::Message> messages, cudaStream_t stream);

// Multiplies what the spans of `call` have received, `count` elements each.
void ScaleReceived(StreamMover& mover, const Collective& call, float factor);

// For a collective with this operation. Sums of scaled inputs need a NcclSum.
ncclRedOp_t PlainOp(ReduceOp op);

}  // namespace ebb
