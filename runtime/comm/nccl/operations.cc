#include "ebb/runtime/comm/nccl/operations.h"

#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/kernels/reduce_launch.h"

namespace ebb {
namespace {

ncclDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kInt8:
      return ncclInt8;
  }
  return ncclNumTypes;
}

bool Failed(ncclResult_t result) {
  return result != ncclSuccess && result != ncclInProgress;
}

struct Enqueuer {
  const NcclLibrary& nccl;
  ncclComm_t comm;
  const NcclGroup& group;
  const Collective& call;
  ncclRedOp_t op;
  cudaStream_t stream;

  ncclResult_t Span(const CollectiveSpan& span) const {
    const auto count = static_cast<size_t>(span.count);
    const ncclDataType_t type = TypeOf(call.dtype);
    switch (call.kind) {
      case CollectiveKind::kAllGather:
        return nccl.AllGather(span.send, span.receive, count, type, comm, stream);
      case CollectiveKind::kReduceScatter:
        return nccl.ReduceScatter(span.send, span.receive, count, type, op, comm, stream);
      case CollectiveKind::kAllReduce:
        return nccl.AllReduce(span.send, span.receive, count, type, op, comm, stream);
      case CollectiveKind::kBroadcast:
        return nccl.Broadcast(call.peer == group.rank ? span.send : span.receive, span.receive,
                              count, type, call.peer, comm, stream);
      case CollectiveKind::kAllToAll:
        return AllToAll(span, count, type);
      case CollectiveKind::kAllToAllV:
        return AllToAllV(span, count, type);
      case CollectiveKind::kSend:
        return nccl.Send(span.send, count, type, call.peer, comm, stream);
      case CollectiveKind::kReceive:
        return nccl.Recv(span.receive, count, type, call.peer, comm, stream);
      case CollectiveKind::kBarrier:
        break;
    }
    return ncclInternalError;
  }

  ncclResult_t AllToAllV(const CollectiveSpan& span, size_t count, ncclDataType_t type) const {
    ncclResult_t result = ncclSuccess;
    if (span.from == group.rank) result = nccl.Send(span.send, count, type, span.to, comm, stream);
    if (Failed(result) || span.to != group.rank) return result;
    return nccl.Recv(span.receive, count, type, span.from, comm, stream);
  }

  ncclResult_t AllToAll(const CollectiveSpan& span, size_t count, ncclDataType_t type) const {
    const size_t block = count * static_cast<size_t>(SizeOf(call.dtype));
    for (int peer = 0; peer < group.size; ++peer) {
      const size_t at = static_cast<size_t>(peer) * block;
      ncclResult_t result =
          nccl.Send(static_cast<const std::byte*>(span.send) + at, count, type, peer, comm, stream);
      if (Failed(result)) return result;
      result =
          nccl.Recv(static_cast<std::byte*>(span.receive) + at, count, type, peer, comm, stream);
      if (Failed(result)) return result;
    }
    return ncclSuccess;
  }
};

// Enqueues all items as one group. The group ends also after an error, because NCCL demands it.
template <class Item>
ncclResult_t InGroup(const NcclLibrary& nccl, std::span<const Item> items,
                     absl::FunctionRef<ncclResult_t(const Item&)> enqueue) {
  ncclResult_t result = nccl.GroupStart();
  if (Failed(result)) return result;
  for (const Item& item : items) {
    result = enqueue(item);
    if (Failed(result)) break;
  }
  const ncclResult_t ended = nccl.GroupEnd();
  return Failed(result) ? result : ended;
}

}  // namespace

absl::Status CheckForNccl(const Collective& call) {
  if (!IsReduction(call)) return absl::OkStatus();
  const std::string_view name = Name(call.kind);
  const absl::string_view text(name.data(), name.size());
  if (call.dtype == DType::kInt8 && call.op == ReduceOp::kSum) {
    return absl::InvalidArgumentError(absl::StrCat(
        text, ": NCCL's int8 sums wrap around instead of saturating: sum in fp32, bf16 or fp16"));
  }
  if (call.op != ReduceOp::kSum && call.scale != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(text, ": NCCL scales sums only, not maxima or minima"));
  }
  return absl::OkStatus();
}

NcclScale ScaleFor(const Collective& call, int ranks) {
  NcclScale scale = {.sum = call.scale};
  // The other types have the range of fp32. If the scale is at least 1, the result overflows when
  // the sum does.
  if (call.dtype != DType::kFloat16 || std::abs(scale.sum) >= 1) return scale;
  scale.inputs = 1.0f / static_cast<float>(std::bit_ceil(static_cast<unsigned>(ranks)));
  scale.sum /= scale.inputs;
  return scale;
}

ncclRedOp_t PlainOp(ReduceOp op) {
  return op == ReduceOp::kMax ? ncclMax : op == ReduceOp::kMin ? ncclMin : ncclSum;
}

ncclResult_t EnqueueGroup(const NcclLibrary& nccl, ncclComm_t comm, const NcclGroup& group,
                          const Collective& call, ncclRedOp_t op, cudaStream_t stream) {
  const Enqueuer enqueuer = {nccl, comm, group, call, op, stream};
  if (call.kind == CollectiveKind::kBarrier)
    return nccl.AllReduce(group.barrier, group.barrier, 1, ncclInt8, ncclMax, comm, stream);
  return InGroup<CollectiveSpan>(nccl, call.spans, [&](const CollectiveSpan& span) {
    return span.count == 0 ? ncclSuccess : enqueuer.Span(span);
  });
}

void ScaleReceived(StreamMover& mover, const Collective& call, float factor) {
  ScaleArrays arrays = {.factor = factor, .dtype = call.dtype};
  const auto scale = [&] {
    if (arrays.spans_count > 0) mover.Scale(arrays);
    arrays.spans_count = 0;
  };
  for (const CollectiveSpan& span : call.spans) {
    if (span.count == 0) continue;
    arrays.spans[arrays.spans_count++] = {.data = span.receive, .count = span.count};
    if (arrays.spans_count == ScaleArrays::kSpansMax) scale();
  }
  scale();
}

ncclResult_t EnqueueMessages(const NcclLibrary& nccl, ncclComm_t comm,
                             std::span<const OrderedSums::Message> messages, cudaStream_t stream) {
  return InGroup<OrderedSums::Message>(nccl, messages, [&](const OrderedSums::Message& message) {
    const auto bytes = static_cast<size_t>(message.bytes);
    return message.send != nullptr
               ? nccl.Send(message.send, bytes, ncclInt8, message.peer, comm, stream)
               : nccl.Recv(message.receive, bytes, ncclInt8, message.peer, comm, stream);
  });
}

absl::Status OrderedSums::CheckScratch(std::span<const std::byte> scratch, int size) {
  constexpr int64_t kAlignment = FlatSpans::kAlignment;  // the kernel's load size
  const bool aligned = reinterpret_cast<uintptr_t>(scratch.data()) % kAlignment == 0;
  const int64_t least = size * kAlignment;
  if (aligned && static_cast<int64_t>(scratch.size()) >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("scratch of ", scratch.size(), " bytes for sums over ", size,
                   " ranks: give at least ", least, ", aligned to ", kAlignment));
}

OrderedSums::OrderedSums(int rank, int size, int reduction_group, std::span<std::byte> scratch)
    : rank_(rank), size_(size), reduction_group_(reduction_group), scratch_(scratch) {}

absl::Status OrderedSums::Run(const Collective& call, Exchange exchange, StreamMover& mover) {
  const Movement inputs = {call, rank_, size_, /*half=*/0}, sums = {call, rank_, size_, /*half=*/1};
  const FlatSpans& flat = inputs.flat;
  const int64_t per_step = stride() / flat.element_bytes();
  for (int64_t step = 0; step * per_step < inputs.elements_max(); ++step) {
    messages_.clear();
    for (int peer = 0; peer < size_; ++peer)
      AddMessages(inputs, step, peer, scratch_.data() + peer * stride());
    EBB_RETURN_IF_ERROR(exchange(messages_));
    flat.Visit(inputs.Sent(rank_, rank_).range.Step(step, per_step),
               [&](const FlatSpans::Piece& piece) {
                 mover.ReduceRow(ReductionOf(call, reduction_group_),
                                 scratch_.data() + piece.at * flat.element_bytes(), stride(), size_,
                                 flat.At(piece, FlatSpans::kReceive, 0), piece.count);
               });
    if (Movement::Halves(call) == 1) continue;
    messages_.clear();
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) AddMessages(sums, step, peer, nullptr);
    }
    if (!messages_.empty()) EBB_RETURN_IF_ERROR(exchange(messages_));
  }
  return absl::OkStatus();
}

void OrderedSums::AddMessages(const Movement& movement, int64_t step, int peer, std::byte* to) {
  const FlatSpans& flat = movement.flat;
  const int64_t element = flat.element_bytes(), per_step = stride() / element;
  const Movement::Part sent = movement.Sent(rank_, peer), received = movement.Sent(peer, rank_);
  flat.Visit(sent.range.Step(step, per_step), [&](const FlatSpans::Piece& piece) {
    messages_.push_back({.send = flat.At(piece, movement.side(), sent.from_block),
                         .bytes = piece.count * element,
                         .peer = peer});
  });
  flat.Visit(received.range.Step(step, per_step), [&](const FlatSpans::Piece& piece) {
    messages_.push_back({.receive = to != nullptr
                                        ? to + piece.at * element
                                        : flat.At(piece, FlatSpans::kReceive, received.to_block),
                         .bytes = piece.count * element,
                         .peer = peer});
  });
}

}  // namespace ebb
