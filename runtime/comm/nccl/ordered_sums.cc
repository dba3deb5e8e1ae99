#include "ebb/runtime/comm/nccl/ordered_sums.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/transfer.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

// Cuts and inputs begin at multiples of the kernel's load size, so that an aligned span stays
// aligned.
constexpr int64_t kAlignment = 16;

int64_t RoundedUp(int64_t value, int64_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace

absl::Status OrderedSums::CheckScratch(std::span<const std::byte> scratch, int size) {
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
  size_t span = 0;
  int64_t begin = 0;
  while (NextPiece(call, span, begin)) {
    SendInputs(call);
    EBB_RETURN_IF_ERROR(exchange(messages_));
    Sum(call, mover);
    if (call.kind != CollectiveKind::kAllReduce) continue;
    SendSums(call);
    if (!messages_.empty()) EBB_RETURN_IF_ERROR(exchange(messages_));
  }
  return absl::OkStatus();
}

bool OrderedSums::NextPiece(const Collective& call, size_t& span, int64_t& begin) {
  cuts_.clear();
  const int64_t element = SizeOf(call.dtype);
  // Bytes of one rank's inputs.
  const int64_t all = static_cast<int64_t>(scratch_.size()) / size_ / kAlignment * kAlignment;
  int64_t room = all;
  while (span < call.spans.size() && room > 0) {
    const int64_t left = call.spans[span].count - begin;
    const int64_t ranks = call.kind == CollectiveKind::kAllReduce ? size_ : 1;
    const int64_t count = std::min(left, ranks * (room / element));
    if (count > 0) {
      cuts_.push_back({.span = &call.spans[span],
                       .begin = begin,
                       .count = count,
                       .scratch = scratch_.data() + (all - room) * size_});
      room -= StrideOf(call, cuts_.back());
    }
    begin += count;
    if (count < left) break;
    ++span;
    begin = 0;
  }
  return !cuts_.empty();
}

OrderedSums::Part OrderedSums::PartOf(const Collective& call, const Cut& cut, int rank) const {
  if (call.kind == CollectiveKind::kReduceScatter)
    return {.begin = rank * cut.span->count + cut.begin, .count = cut.count};
  const int64_t part = StrideOf(call, cut) / SizeOf(call.dtype);
  const int64_t begin = std::min(cut.count, rank * part);
  return {.begin = cut.begin + begin, .count = std::min(cut.count - begin, part)};
}

int64_t OrderedSums::StrideOf(const Collective& call, const Cut& cut) const {
  const int64_t parts = call.kind == CollectiveKind::kAllReduce ? size_ : 1;
  return RoundedUp((cut.count + parts - 1) / parts * SizeOf(call.dtype), kAlignment);
}

std::byte* OrderedSums::DestinationOf(const Collective& call, const Cut& cut) const {
  const int64_t begin =
      call.kind == CollectiveKind::kAllReduce ? PartOf(call, cut, rank_).begin : cut.begin;
  return static_cast<std::byte*>(cut.span->receive) + begin * SizeOf(call.dtype);
}

void OrderedSums::SendInputs(const Collective& call) {
  messages_.clear();
  const int64_t element = SizeOf(call.dtype);
  for (const Cut& cut : cuts_) {
    const int64_t mine = PartOf(call, cut, rank_).count * element, stride = StrideOf(call, cut);
    for (int peer = 0; peer < size_; ++peer) {
      const Part part = PartOf(call, cut, peer);
      if (part.count > 0) {
        messages_.push_back(
            {.send = static_cast<const std::byte*>(cut.span->send) + part.begin * element,
             .bytes = part.count * element,
             .peer = peer});
      }
      if (mine > 0) {
        messages_.push_back({.receive = cut.scratch + peer * stride, .bytes = mine, .peer = peer});
      }
    }
  }
}

void OrderedSums::Sum(const Collective& call, StreamMover& mover) const {
  for (const Cut& cut : cuts_) {
    const int64_t count = PartOf(call, cut, rank_).count;
    if (count == 0) continue;
    mover.ReduceRow(ReductionOf(call, reduction_group_), cut.scratch, StrideOf(call, cut), size_,
                    DestinationOf(call, cut), count);
  }
}

void OrderedSums::SendSums(const Collective& call) {
  messages_.clear();
  const int64_t element = SizeOf(call.dtype);
  for (const Cut& cut : cuts_) {
    const Part mine = PartOf(call, cut, rank_);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      const Part part = PartOf(call, cut, peer);
      auto* const receive = static_cast<std::byte*>(cut.span->receive);
      if (mine.count > 0) {
        messages_.push_back(
            {.send = receive + mine.begin * element, .bytes = mine.count * element, .peer = peer});
      }
      if (part.count > 0) {
        messages_.push_back({.receive = receive + part.begin * element,
                             .bytes = part.count * element,
                             .peer = peer});
      }
    }
  }
}

}  // namespace ebb
