#include "ebb/runtime/comm/node/exchange.h"

#include <algorithm>
#include <cstring>

#include "ebb/runtime/comm/node/pieces.h"
#include "ebb/runtime/comm/transfer.h"
#include "ebb/runtime/device/cpu/copy.h"

namespace ebb {
namespace {

// An exchange as one word: its number between the two ranks, and the other rank.
constexpr int kPeerBits = 20;
uint64_t Word(uint64_t number, int peer) {
  return number << kPeerBits | static_cast<uint64_t>(peer + 1);
}

}  // namespace

Exchange::Exchange(NodeGroup& group) : group_(group), numbers_(static_cast<size_t>(group.size())) {}

bool Exchange::Run(const Collective& call, WaitPoint::Deadline deadline) {
  const int me = group_.rank(), peer = call.peer;
  node::GroupSeat& mine = group_.seat(me);
  const uint64_t number = ++numbers_[static_cast<size_t>(peer)];
  mine.post = Summarise(call);
  mine.post_sent = mine.sent.load(std::memory_order_relaxed);
  mine.posted.store(Word(number, peer), std::memory_order_seq_cst);
  group_.header().posted.fetch_add(1, std::memory_order_seq_cst);
  group_.Wake(peer);
  const bool done =
      Meet(call, deadline) &&
      (call.kind == CollectiveKind::kSend ? Send(call, deadline) : Receive(call, deadline));
  if (!done) return false;
  // The peer has to have seen the post before it is taken back.
  std::atomic<uint64_t>& seen = group_.seen(peer, me);
  if (!group_.AwaitRank(peer, call, deadline, spin_,
                        [&] { return seen.load(std::memory_order_acquire) >= number; }))
    return false;
  mine.posted.store(0, std::memory_order_seq_cst);
  group_.header().posted.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

bool Exchange::Meet(const Collective& call, WaitPoint::Deadline deadline) {
  const int me = group_.rank(), peer = call.peer;
  node::GroupSeat &mine = group_.seat(me), &other = group_.seat(peer);
  const uint64_t number = numbers_[static_cast<size_t>(peer)];
  const uint64_t called = mine.called.load(std::memory_order_relaxed);
  const auto came = [&] {
    return other.posted.load(std::memory_order_seq_cst) == Word(number, me);
  };
  const auto is_at_a_collective = [&] {
    return other.called.load(std::memory_order_seq_cst) > called;
  };
  if (!group_.AwaitRank(peer, call, deadline, spin_,
                        [&] { return came() || is_at_a_collective(); }))
    return false;
  if (!came()) {
    // It cannot have gone on to the next one, for which it needs this rank.
    group_.FailMismatch(peer, other.headers[(called + 1) % 2].call, me, mine.post);
    return false;
  }
  if (!FitForExchange(mine.post, other.post)) {
    const int first = std::min(me, peer), second = std::max(me, peer);
    group_.FailMismatch(first, group_.seat(first).post, second, group_.seat(second).post);
    return false;
  }
  return true;
}

bool Exchange::Send(const Collective& call, WaitPoint::Deadline deadline) {
  const int me = group_.rank(), peer = call.peer;
  node::GroupSeat& mine = group_.seat(me);
  group_.seen(me, peer).store(numbers_[static_cast<size_t>(peer)], std::memory_order_release);
  group_.Wake(peer);
  const int64_t element = SizeOf(call.dtype), elements = TotalBytes(call, 1) / element;
  const int64_t per_step = group_.layout().slot_bytes() / element;
  node::Pieces pieces(call.spans);
  uint64_t sent = mine.sent.load(std::memory_order_relaxed);
  const auto await_taken = [&](uint64_t needed) {
    return group_.AwaitRank(peer, call, deadline, spin_,
                            [&] { return mine.taken.load(std::memory_order_acquire) >= needed; });
  };
  for (int64_t begin = 0; begin < elements; begin += per_step, ++sent) {
    if (sent >= node::kSlots && !await_taken(sent + 1 - node::kSlots)) return false;
    std::byte* const slot = group_.exchange_slot(me, sent);
    pieces(begin, std::min(elements, begin + per_step),
           [&](const CollectiveSpan& span, int64_t first, int64_t count, int64_t at) {
             std::memcpy(slot + at * element,
                         static_cast<const std::byte*>(span.send) + first * element,
                         static_cast<size_t>(count * element));
           });
    mine.sent.store(sent + 1, std::memory_order_release);
    group_.Wake(peer);
  }
  return await_taken(sent);
}

bool Exchange::Receive(const Collective& call, WaitPoint::Deadline deadline) {
  const int me = group_.rank(), peer = call.peer;
  node::GroupSeat& other = group_.seat(peer);
  uint64_t step = other.post_sent;
  group_.seen(me, peer).store(numbers_[static_cast<size_t>(peer)], std::memory_order_release);
  group_.Wake(peer);
  const int64_t element = SizeOf(call.dtype), elements = TotalBytes(call, 1) / element;
  const int64_t per_step = group_.layout().slot_bytes() / element;
  node::Pieces pieces(call.spans);
  for (int64_t begin = 0; begin < elements; begin += per_step, ++step) {
    if (!group_.AwaitRank(peer, call, deadline, spin_,
                          [&] { return other.sent.load(std::memory_order_acquire) > step; }))
      return false;
    const std::byte* const slot = group_.exchange_slot(peer, step);
    pieces(begin, std::min(elements, begin + per_step),
           [&](const CollectiveSpan& span, int64_t first, int64_t count, int64_t at) {
             CopyBytes(thread_, static_cast<std::byte*>(span.receive) + first * element,
                       slot + at * element, count * element, elements * element);
           });
    other.taken.store(step + 1, std::memory_order_release);
    group_.Wake(peer);
  }
  return true;
}

int Exchange::Awaiting() {
  if (group_.header().posted.load(std::memory_order_seq_cst) == 0) return -1;
  for (int peer = 0; peer < group_.size(); ++peer) {
    const uint64_t next = numbers_[static_cast<size_t>(peer)] + 1;
    if (group_.seat(peer).posted.load(std::memory_order_seq_cst) == Word(next, group_.rank()))
      return peer;
  }
  return -1;
}

bool Exchange::FailIfAwaited(const CallSummary& mine) {
  const int peer = Awaiting();
  if (peer < 0) return false;
  group_.FailMismatch(group_.rank(), mine, peer, group_.seat(peer).post);
  return true;
}

}  // namespace ebb
