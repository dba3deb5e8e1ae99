#include "ebb/runtime/comm/staged.h"

#include <cstring>

#include "ebb/runtime/device/cpu/copy.h"

namespace ebb {

void StagedMovement::Fill(int peer, int64_t step, std::byte* slot) const {
  const Movement::Part part = SentTo(peer);
  flat_.Visit(At(part, step), [&](const FlatSpans::Piece& piece) {
    std::memcpy(slot + piece.at * flat_.element_bytes(),
                flat_.At(piece, movement_.side(), part.from_block),
                static_cast<size_t>(piece.count * flat_.element_bytes()));
  });
}

void StagedMovement::Consume(int64_t step, Received received) const {
  if (movement_.sums()) return Sum(step, received);
  const int64_t total = TotalBytes(call(), 1);
  for (int k = 1; k < movement_.size; ++k) {
    const int peer = (movement_.rank + k) % movement_.size;  // every rank begins elsewhere
    const Movement::Part part = SentFrom(peer);
    flat_.Visit(At(part, step), [&](const FlatSpans::Piece& piece) {
      CopyBytes(team_, flat_.At(piece, FlatSpans::kReceive, part.to_block),
                received(peer, step) + piece.at * flat_.element_bytes(),
                piece.count * flat_.element_bytes(), total);
    });
  }
}

void StagedMovement::Sum(int64_t step, Received received) const {
  const Movement::Part part = SentFrom(movement_.rank);  // others send as much
  flat_.Visit(At(part, step), [&](const FlatSpans::Piece& piece) {
    for (int peer = 0; peer < movement_.size; ++peer) {
      inputs_[static_cast<size_t>(peer)] =
          peer == movement_.rank ? flat_.At(piece, FlatSpans::kSend, part.from_block)
                                 : received(peer, step) + piece.at * flat_.element_bytes();
    }
    Reduce(team_, ReductionOf(call(), reduction_group_), inputs_,
           flat_.At(piece, FlatSpans::kReceive, 0), piece.count);
  });
}

void StagedMovement::CopyOwn() const {
  if (movement_.sums()) return;
  const Movement::Part part = SentFrom(movement_.rank);
  flat_.Visit(part.range, [&](const FlatSpans::Piece& piece) {
    CopyBytes(team_, flat_.At(piece, FlatSpans::kReceive, part.to_block),
              flat_.At(piece, movement_.side(), part.from_block),
              piece.count * flat_.element_bytes(), TotalBytes(call(), 1));
  });
}

}  // namespace ebb
