// The calls of communicator.h as calls of NCCL: one group an operation.
#pragma once

#include <nccl.h>

#include <span>

#include "absl/status/status.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/nccl/ordered_sums.h"

namespace ebb {

// What NCCL's own operations cannot do of what communicator.h allows.
absl::Status CheckForNccl(const Collective& call);

// What a sum's inputs and what the sum is multiplied with: together its scale. Inputs only where the
// sum might overflow otherwise, because for any operator but its plain sum NCCL does without much of
// what registered memory is for: symmetric kernels, sums inside the switch, PAT (2.28.9:
// sym_kernels.cc, register/coll_reg.cc, enqueue.cc). Neither rounds the scale: `inputs` is a power of
// two, and the sum is multiplied in fp32.
struct NcclScale {
  float inputs = 1;
  float sum = 1;
};
NcclScale ScaleFor(const Collective& call, int ranks);

// Sums of inputs that are multiplied first: an operator of NCCL's for one operation. Made before the
// operation and destroyed when its call has returned and is not in progress.
class NcclSum {
 public:
  // Of NcclScale::inputs. 1: no operator of its own.
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

// Enqueues `call` on `stream`. `op`: of its reduction.
ncclResult_t EnqueueGroup(const NcclLibrary& nccl, ncclComm_t comm, const NcclGroup& group,
                          const Collective& call, ncclRedOp_t op, cudaStream_t stream);

// The same for sends and receives, of bytes.
ncclResult_t EnqueueMessages(const NcclLibrary& nccl, ncclComm_t comm,
                             std::span<const OrderedSums::Message> messages, cudaStream_t stream);

// Of a collective with this operation; sums whose inputs are multiplied need a NcclSum.
ncclRedOp_t PlainOp(ReduceOp op);

}  // namespace ebb
