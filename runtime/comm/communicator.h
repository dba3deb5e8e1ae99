// Collectives between the ranks of a group, enqueued on a stream. Move-only.
//
//   all-gather       each rank sends `count` elements; `receive` holds size * count, by rank
//   reduce-scatter   `send` holds size * count; rank r receives the sum of the r-th count elements
//   all-reduce       count in, count out
//   broadcast        count elements from the root's `send` to every `receive`
//   all-to-all       size * count in and out; block p of `send` goes to rank p, of `receive` is p's
//   all-to-all-v     count elements of rank `from` go to rank `to`, which may be the same: all ranks
//                    name all spans, in the order of `from`, then `to`. `send` is read on rank
//                    `from` alone, `receive` is written on rank `to` alone
//
// Every call takes several spans and runs them as one group. In place is allowed where NCCL allows
// it: all-gather with send == receive + rank * count, reduce-scatter with receive == send + rank *
// count, all-reduce and broadcast with send == receive. One rank in place enqueues nothing, unless
// a sum is to be scaled. The span array and the memory are borrowed until the operation has run on
// `stream`.
//
// Order of sums: rank order inside a reduction group, then group order, partials in fp32,
// multiplied by `scale` before the one rounding to the dtype (nearest, ties to even). int8 sums
// saturate. All backends but NCCL give the same bits for the same group size. NCCL has an order of
// its own and rounds partial sums; its results are multiplied in fp32 and rounded once more
// (nccl/nccl_world.h). SumInOrder gives NCCL the bits of the others.
//
// Ranks call the same operations in the same order with the same counts. A call returns an error at
// once only for arguments that this rank alone can see to be wrong. A later fault (a rank failed,
// left, called something else, or did not come within the time-out) fails the communicator for
// good: status() says why, every later operation does nothing, and `receive` is undefined. Nothing
// hangs. Threads: one enqueuing thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/kernels/reduce.h"

namespace ebb {

struct CollectiveSpan {
  const void* send = nullptr;
  void* receive = nullptr;
  int64_t count = 0;           // elements, as above
  int32_t from = -1, to = -1;  // all-to-all-v: ranks
  friend bool operator==(const CollectiveSpan&, const CollectiveSpan&) = default;
  template <class H>
  friend H AbslHashValue(H hash, const CollectiveSpan& span) {
    return H::combine(std::move(hash), span.send, span.receive, span.count, span.from, span.to);
  }
};

class CommunicatorBackend;
struct Collective;

class Communicator {
 public:
  explicit Communicator(std::unique_ptr<CommunicatorBackend> backend);
  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;
  ~Communicator();

  int rank() const;
  int size() const;

  absl::Status AllGather(Stream& stream, std::span<const CollectiveSpan> spans, DType dtype);
  absl::Status ReduceScatter(Stream& stream, std::span<const CollectiveSpan> spans, DType dtype,
                             float scale = 1);
  absl::Status AllReduce(Stream& stream, std::span<const CollectiveSpan> spans, DType dtype,
                         ReduceOp op = ReduceOp::kSum, float scale = 1);
  absl::Status Broadcast(Stream& stream, std::span<const CollectiveSpan> spans, DType dtype,
                         int root);
  absl::Status AllToAll(Stream& stream, std::span<const CollectiveSpan> spans, DType dtype);
  absl::Status AllToAllV(Stream& stream, std::span<const CollectiveSpan> spans, DType dtype);
  // Point to point. The peer makes the opposite call with the same counts. Only the named side of
  // each span is used.
  absl::Status Send(Stream& stream, std::span<const CollectiveSpan> spans, DType dtype, int peer);
  absl::Status Receive(Stream& stream, std::span<const CollectiveSpan> spans, DType dtype,
                       int peer);
  absl::Status Barrier(Stream& stream);

  // From now on sums have the order above also on a backend with its own order (NCCL). The ranks'
  // inputs meet in `scratch`, which operations use one after the other and which is borrowed until
  // another one is given. Communicators may share it if their reductions all run on one stream.
  // `scratch` is device memory, aligned to 16 bytes, with at least 16 bytes for each rank; larger
  // operations are cut into more pieces. Other backends ignore it. Call it between operations, on
  // all ranks, with the same size.
  absl::Status SumInOrder(std::span<std::byte> scratch);

  // Registers memory of World::Allocate that operations use again and again, so that NCCL may move
  // it without copies of its own. Collective: the same sizes in the same order. After an error
  // status() says whether the communicator still works, with copies. No rank may register more
  // before all ranks know of the error. Other backends ignore it. Deregister undoes every Register.
  // Call it before the memory is freed, while no operation runs on any rank.
  absl::Status Register(std::span<std::byte> memory);
  void Deregister();

  // This rank makes no more calls: a rank that calls this communicator and waits for this rank
  // fails. Waits until this rank's calls have ended. The destructor calls it. Call it earlier if
  // you free device memory, or have several communicators: freeing waits for the device, on which
  // ranks that share it may be waiting for this rank.
  void Leave();

  // The first failure, sticky. Any thread.
  absl::Status status() const;
  // Makes every rank's pending and later operations fail with `why`. Any thread.
  void Abort(absl::Status why);
  // Bytes of all operations that were enqueued: what this rank receives from other ranks
  // (all-gather, broadcast, ...) or sends to them (reduce-scatter), that is (N-1)/N of the whole
  // buffer. Call it on the enqueuing thread.
  int64_t bytes_enqueued() const { return bytes_enqueued_; }

 private:
  absl::Status Enqueue(Stream& stream, const Collective& call);

  std::unique_ptr<CommunicatorBackend> backend_;
  int64_t bytes_enqueued_ = 0;
};

}  // namespace ebb
