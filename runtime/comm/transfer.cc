#include "ebb/runtime/comm/transfer.h"

#include <algorithm>
#include <span>

namespace ebb {
namespace {

const std::byte* At(const void* base, int64_t bytes) {
  return static_cast<const std::byte*>(base) + bytes;
}
std::byte* At(void* base, int64_t bytes) {
  return static_cast<std::byte*>(base) + bytes;
}

// The part of an all-reduced span that one rank sums. It has whole cache lines, so that no two
// ranks write to one line.
struct SummedPart {
  int64_t begin = 0;
  int64_t count = 0;
};
SummedPart PartOf(int rank, int size, int64_t count, DType dtype) {
  const int64_t line = 64 / SizeOf(dtype);
  const int64_t part = ((count + size - 1) / size + line - 1) / line * line;
  const int64_t begin = std::min(count, rank * part);
  return {.begin = begin, .count = std::min(count - begin, part)};
}

}  // namespace

int64_t TotalBytes(const Collective& call, int64_t blocks) {
  int64_t count = 0;
  for (const CollectiveSpan& span : call.spans) count += span.count;
  return count * blocks * SizeOf(call.dtype);
}

Reduction ReductionOf(const Collective& call, int reduction_group) {
  return {.dtype = call.dtype, .op = call.op, .scale = call.scale, .group = reduction_group};
}

Transfer::Transfer(int rank, int size, int reduction_group)
    : rank_(rank),
      size_(size),
      reduction_group_(reduction_group),
      inputs_(static_cast<size_t>(size)),
      copies_(static_cast<size_t>(size)) {}

void Transfer::Run(const Collective& call, MemoryOf send, Mover& mover) {
  switch (call.kind) {
    case CollectiveKind::kAllGather:
      return CopyFromAll(call, send, {.send = 0, .receive = 1}, mover);
    case CollectiveKind::kAllToAll:
      return CopyFromAll(call, send, {.send = rank_, .receive = 1}, mover);
    case CollectiveKind::kBroadcast:
      return CopyFromRoot(call, send, mover);
    case CollectiveKind::kReduceScatter:
      return ReduceOwnBlocks(call, send, mover);
    case CollectiveKind::kAllReduce:
      return ReduceOwnSlices(call, send, mover);
    case CollectiveKind::kBarrier:
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive:
      return;
  }
}

void Transfer::CopyFromAll(const Collective& call, MemoryOf send, Blocks blocks, Mover& mover) {
  const int64_t total = TotalBytes(call, size_);
  for (size_t i = 0; i < call.spans.size(); ++i) {
    const int64_t bytes = call.spans[i].count * SizeOf(call.dtype);
    if (bytes == 0) continue;
    for (int step = 0; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;  // every rank begins elsewhere
      copies_[static_cast<size_t>(step)] = {
          .destination = At(call.spans[i].receive, peer * blocks.receive * bytes),
          .source = At(send(peer, i), blocks.send * bytes)};
    }
    mover.CopyInStep(copies_, bytes, total);
  }
}

void Transfer::CopyFromRoot(const Collective& call, MemoryOf send, Mover& mover) {
  const int64_t total = TotalBytes(call, 1);
  for (size_t i = 0; i < call.spans.size(); ++i) {
    if (call.spans[i].count == 0) continue;
    mover.Copy(call.spans[i].receive, send(call.peer, i), call.spans[i].count * SizeOf(call.dtype),
               total);
  }
}

void Transfer::ReduceOwnBlocks(const Collective& call, MemoryOf send, Mover& mover) {
  const int64_t total = TotalBytes(call, 1);
  for (size_t i = 0; i < call.spans.size(); ++i) {
    const int64_t count = call.spans[i].count;
    Reduce(call, send, i, rank_ * count, call.spans[i].receive, count, total, mover);
  }
}

void Transfer::ReduceOwnSlices(const Collective& call, MemoryOf send, Mover& mover) {
  const int64_t total = TotalBytes(call, 1) / size_;
  for (size_t i = 0; i < call.spans.size(); ++i) {
    const SummedPart mine = PartOf(rank_, size_, call.spans[i].count, call.dtype);
    Reduce(call, send, i, mine.begin, At(call.spans[i].receive, mine.begin * SizeOf(call.dtype)),
           mine.count, total, mover);
  }
}

void Transfer::RunSecond(const Collective& call, MemoryOf receive, Mover& mover) {
  const int64_t total = TotalBytes(call, 1);
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    for (size_t i = 0; i < call.spans.size(); ++i) {
      const SummedPart part = PartOf(peer, size_, call.spans[i].count, call.dtype);
      if (part.count == 0) continue;
      const int64_t begin = part.begin * SizeOf(call.dtype);
      mover.Copy(At(call.spans[i].receive, begin), At(receive(peer, i), begin),
                 part.count * SizeOf(call.dtype), total);
    }
  }
}

void Transfer::Reduce(const Collective& call, MemoryOf send, size_t span, int64_t send_offset,
                      void* destination, int64_t count, int64_t total_bytes, Mover& mover) {
  if (count == 0) return;
  for (int peer = 0; peer < size_; ++peer) {
    inputs_[static_cast<size_t>(peer)] = At(send(peer, span), send_offset * SizeOf(call.dtype));
  }
  mover.Reduce(ReductionOf(call, reduction_group_), inputs_, destination, count, total_bytes);
}

}  // namespace ebb
