#include "ebb/runtime/comm/nccl/ordered_sums.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {

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
