#include "ebb/runtime/comm/communicator.h"

#include <utility>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/collective.h"

namespace ebb {

Communicator::Communicator(std::unique_ptr<CommunicatorBackend> backend)
    : backend_(std::move(backend)) {}
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;
Communicator::~Communicator() = default;

int Communicator::rank() const {
  return backend_->rank();
}
int Communicator::size() const {
  return backend_->size();
}

absl::Status Communicator::AllGather(Stream& stream, std::span<const CollectiveSpan> spans,
                                     DType dtype) {
  return Enqueue(stream, {.kind = CollectiveKind::kAllGather, .dtype = dtype, .spans = spans});
}

absl::Status Communicator::ReduceScatter(Stream& stream, std::span<const CollectiveSpan> spans,
                                         DType dtype, float scale) {
  return Enqueue(
      stream,
      {.kind = CollectiveKind::kReduceScatter, .dtype = dtype, .scale = scale, .spans = spans});
}

absl::Status Communicator::AllReduce(Stream& stream, std::span<const CollectiveSpan> spans,
                                     DType dtype, ReduceOp op, float scale) {
  return Enqueue(stream, {.kind = CollectiveKind::kAllReduce,
                          .dtype = dtype,
                          .op = op,
                          .scale = scale,
                          .spans = spans});
}

absl::Status Communicator::Broadcast(Stream& stream, std::span<const CollectiveSpan> spans,
                                     DType dtype, int root) {
  return Enqueue(
      stream, {.kind = CollectiveKind::kBroadcast, .dtype = dtype, .peer = root, .spans = spans});
}

absl::Status Communicator::AllToAll(Stream& stream, std::span<const CollectiveSpan> spans,
                                    DType dtype) {
  return Enqueue(stream, {.kind = CollectiveKind::kAllToAll, .dtype = dtype, .spans = spans});
}

absl::Status Communicator::AllToAllV(Stream& stream, std::span<const CollectiveSpan> spans,
                                     DType dtype) {
  return Enqueue(stream, {.kind = CollectiveKind::kAllToAllV, .dtype = dtype, .spans = spans});
}

absl::Status Communicator::Send(Stream& stream, std::span<const CollectiveSpan> spans, DType dtype,
                                int peer) {
  return Enqueue(stream,
                 {.kind = CollectiveKind::kSend, .dtype = dtype, .peer = peer, .spans = spans});
}

absl::Status Communicator::Receive(Stream& stream, std::span<const CollectiveSpan> spans,
                                   DType dtype, int peer) {
  return Enqueue(stream,
                 {.kind = CollectiveKind::kReceive, .dtype = dtype, .peer = peer, .spans = spans});
}

absl::Status Communicator::Barrier(Stream& stream) {
  return Enqueue(stream, {.kind = CollectiveKind::kBarrier});
}

absl::Status Communicator::SumInOrder(std::span<std::byte> scratch) {
  return backend_->SumInOrder(scratch);
}

absl::Status Communicator::Register(std::span<std::byte> memory) {
  return backend_->Register(memory);
}
void Communicator::Deregister() {
  backend_->Deregister();
}

void Communicator::Leave() {
  backend_->Leave();
}

absl::Status Communicator::status() const {
  return backend_->status();
}
void Communicator::Abort(absl::Status why) {
  backend_->Abort(std::move(why));
}

absl::Status Communicator::Enqueue(Stream& stream, const Collective& call) {
  EBB_RETURN_IF_ERROR(CheckArguments(call, rank(), size()));
  if (MovesNothing(call, size())) return backend_->status();
  EBB_RETURN_IF_ERROR(backend_->Enqueue(stream, call));
  bytes_enqueued_ += BytesMoved(call, rank(), size());
  return absl::OkStatus();
}

}  // namespace ebb
