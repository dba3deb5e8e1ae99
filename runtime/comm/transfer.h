// A rank's work in a collective if it can read the other ranks' buffers in place. All ranks have
// made the same call, and no rank's buffers change until all are done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/kernels/mover.h"
#include "ebb/runtime/kernels/reduce.h"

namespace ebb {

class Transfer {
 public:
  // A rank's send or receive memory of a span, as this rank reads it.
  using MemoryOf = absl::FunctionRef<const void*(int rank, size_t span)>;

  Transfer(int rank, int size, int reduction_group);

  void Run(const Collective& call, MemoryOf send, Mover& mover);
  // An all-reduce has a second part. All ranks meet between the two.
  static bool HasSecond(const Collective& call) { return call.kind == CollectiveKind::kAllReduce; }
  void RunSecond(const Collective& call, MemoryOf receive, Mover& mover);

 private:
  // Where element 0 of a peer's block begins, in counts of a span.
  struct Blocks {
    int64_t send = 0;     // in the peer's send memory
    int64_t receive = 0;  // in this rank's receive memory, times the peer's rank
  };
  void CopyFromAll(const Collective& call, MemoryOf send, Blocks blocks, Mover& mover);
  void CopyFromRoot(const Collective& call, MemoryOf send, Mover& mover);
  void ReduceOwnBlocks(const Collective& call, MemoryOf send, Mover& mover);
  void ReduceOwnSlices(const Collective& call, MemoryOf send, Mover& mover);
  void Reduce(const Collective& call, MemoryOf send, size_t span, int64_t send_offset,
              void* destination, int64_t count, int64_t total_bytes, Mover& mover);

  const int rank_;
  const int size_;
  const int reduction_group_;
  std::vector<const void*> inputs_;  // of a reduction, by rank
  std::vector<CopyEnds> copies_;     // of a span, one for each rank
};

// The arithmetic of a call.
Reduction ReductionOf(const Collective& call, int reduction_group);

// The bytes that a rank writes of all of a call's spans. Whether a copy bypasses the caches depends
// on the operation, not on its pieces.
int64_t TotalBytes(const Collective& call, int64_t blocks);

}  // namespace ebb
