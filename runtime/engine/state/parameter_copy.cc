#include "ebb/runtime/engine/state/parameter_copy.h"

#include <algorithm>

#include "ebb/optim/cast.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {

using sharding::Transfer;

// In the staging, the bytes that a device receives follow those that it sends.
absl::Status ParameterCopy::Prepare(const Device& device, int ranks, MemoryLedger& ledger) {
  const auto side = [](const StateAccess& of) {
    return sharding::CopySide{.model = &of.model(),
                              .layout = &of.plan().layout,
                              .compute = of.compute(),
                              .master = of.master()};
  };
  EBB_ASSIGN_OR_RETURN(plan_,
                       sharding::PlanCopy(side(source_), side(destination_), ranks, kBytesMax));
  const Device host = Device::Cpu(1);
  for (Buffer* buffer : {&send_, &receive_}) {
    EBB_ASSIGN_OR_RETURN(*buffer,
                         host.Allocate(plan_.staging_bytes, "the staging of CopyParametersFrom"));
  }
  charge_ = MemoryLedger::Charge(ledger, StateClass::kStaging, Tier::kCpu, 2 * plan_.staging_bytes);
  return mirror_.Allocate(device, 2 * kBytesMax, ledger);
}

absl::Status ParameterCopy::Run() {
  absl::Status status;
  for (size_t round = 0; round < plan_.rounds.size() && status.ok(); ++round)
    status = RunRound(plan_.rounds[round]);
  for (StateAccess* side : {&source_, &destination_}) status.Update(side->values().Await());
  status.Update(lane_.communicator.status());
  return status;
}

absl::Status ParameterCopy::RunRound(std::span<const Transfer> transfers) {
  const absl::StatusOr<int64_t> packed = Pack(transfers);
  if (!packed.ok()) {
    lane_.communicator.Abort(packed.status());  // the others are waiting for this rank's messages
    return packed.status();
  }
  EBB_RETURN_IF_ERROR(Exchange(transfers, *packed));
  return Unpack(transfers);
}

// Calls `move(begin)` for elements of a transfer, as many at once as values_ then holds.
absl::Status ParameterCopy::InParts(const Transfer& transfer,
                                    absl::FunctionRef<absl::Status(int64_t begin)> move) {
  for (int64_t begin = transfer.begin; begin < transfer.end; begin += sharding::kRunElements) {
    const int64_t end = std::min(transfer.end, begin + sharding::kRunElements);
    values_.resize(static_cast<size_t>(end - begin));
    EBB_RETURN_IF_ERROR(move(begin));
  }
  return absl::OkStatus();
}

// Copies elements for other ranks into the staging, and the others to their destination. Returns
// the bytes to send.
absl::StatusOr<int64_t> ParameterCopy::Pack(std::span<const Transfer> transfers) {
  ThreadTeam& team = source_.values().team();
  int64_t packed = 0;
  for (const Transfer& transfer : transfers) {
    if (transfer.from != rank_) continue;
    EBB_ASSIGN_OR_RETURN(const StateAccess::Found from,
                         source_.Find(transfer.source, {StateClass::kMaster}));
    if (verified_ != from.array)
      EBB_RETURN_IF_ERROR(source_.values().Verify({.array = from.array}));
    verified_ = from.array;
    EBB_RETURN_IF_ERROR(InParts(transfer, [&](int64_t begin) -> absl::Status {
      EBB_RETURN_IF_ERROR(
          source_.values().Read(from.Range(begin, begin + std::ssize(values_)), values_));
      if (transfer.to == rank_) return Write(transfer, begin);
      optim::Cast(team, values_.data(), DType::kFloat32,
                  send_.data() + packed + (begin - transfer.begin) * SizeOf(transfer.dtype),
                  transfer.dtype, std::ssize(values_), optim::Rounding::kParameter);
      return absl::OkStatus();
    }));
    packed += transfer.staged_bytes();
  }
  return packed;
}

absl::Status ParameterCopy::Write(const Transfer& transfer, int64_t begin) {
  EBB_ASSIGN_OR_RETURN(const StateAccess::Found to,
                       destination_.Find(transfer.destination, {StateClass::kMaster}));
  const sharding::StateRange range = to.Range(begin, begin + std::ssize(values_));
  EBB_RETURN_IF_ERROR(destination_.values().Write(range, values_));
  return destination_.CastMasters(range, values_);
}

// One message for each pair of ranks.
absl::Status ParameterCopy::Exchange(std::span<const Transfer> transfers, int64_t packed) {
  const auto& [control, stream, others, world] = lane_;
  messages_.clear();
  messages_.reserve(transfers.size());
  int64_t sent = 0, received = 0;
  mirror_.Upload(stream, send_.data(), 0, packed);
  for (size_t i = 0; i < transfers.size();) {
    const int from = transfers[i].from, to = transfers[i].to;
    int64_t bytes = 0;
    for (; i < transfers.size() && transfers[i].from == from && transfers[i].to == to; ++i)
      bytes += transfers[i].staged_bytes();
    if (from == to || (from != rank_ && to != rank_)) continue;
    CollectiveSpan& message = messages_.emplace_back();
    message.count = bytes;
    absl::Status called;
    if (from == rank_) {
      message.send = mirror_.Of(send_.data(), 0) + sent;
      sent += bytes;
      called = control.Send(stream, {&message, 1}, DType::kInt8,
                            inputs_.CallRank(to, inputs_.tensor_rank()));
    } else {
      message.receive = mirror_.Of(receive_.data(), kBytesMax) + received;
      received += bytes;
      called = control.Receive(stream, {&message, 1}, DType::kInt8,
                               inputs_.CallRank(from, inputs_.tensor_rank()));
    }
    if (!called.ok()) control.Abort(called);
  }
  mirror_.Download(stream, kBytesMax, received);
  stream.WaitIdle();
  mirror_.Take(receive_.data(), kBytesMax, received);
  return control.status();
}

absl::Status ParameterCopy::Unpack(std::span<const Transfer> transfers) {
  ThreadTeam& team = destination_.values().team();
  int64_t unpacked = 0;
  for (const Transfer& transfer : transfers) {
    if (transfer.to != rank_ || transfer.from == rank_) continue;
    EBB_RETURN_IF_ERROR(InParts(transfer, [&](int64_t begin) {
      optim::Cast(team,
                  receive_.data() + unpacked + (begin - transfer.begin) * SizeOf(transfer.dtype),
                  transfer.dtype, values_.data(), DType::kFloat32, std::ssize(values_),
                  optim::Rounding::kNearest);
      return Write(transfer, begin);
    }));
    unpacked += transfer.staged_bytes();
  }
  return absl::OkStatus();
}

}  // namespace ebb
