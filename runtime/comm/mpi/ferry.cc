#include "ebb/runtime/comm/mpi/ferry.h"

#include <algorithm>
#include <chrono>

namespace ebb {
namespace {

constexpr std::chrono::seconds kFarewell{2};

// Large enough for the network's bandwidth, and not too much in all of a large communicator.
int64_t SlotBytes(int ranks, int slots) {
  constexpr int64_t kLargest = int64_t{512} << 10, kSmallest = int64_t{64} << 10;
  constexpr int64_t kTogether = int64_t{32} << 20;
  return std::clamp(kTogether / (int64_t{ranks} * slots) / kSmallest * kSmallest, kSmallest,
                    kLargest);
}

}  // namespace

Ferry::Ferry(MpiGroup& group)
    : group_(group),
      slot_bytes_(SlotBytes(group.size(), 2 * kSlots)),
      // Not initialised, so that what is never used stays without pages.
      memory_(new std::byte[static_cast<size_t>(2 * kSlots * group.size() * slot_bytes_)]),
      messages_(static_cast<size_t>(2 * kSlots * group.size())) {}

Ferry::~Ferry() {
  const WaitPoint::Deadline deadline = WaitPoint::Clock::now() + kFarewell;
  for (MpiMessage& message : messages_)
    if (!group_.Await([&] { return message.Test(); }, deadline)) break;
}

std::byte* Ferry::Slot(int first, int peer, int64_t step) const {
  return memory_.get() + (int64_t{2 * kSlots} * peer + first + step % kSlots) * slot_bytes_;
}

MpiMessage& Ferry::Message(int first, int peer, int64_t step) {
  return messages_[static_cast<size_t>(int64_t{2 * kSlots} * peer + first + step % kSlots)];
}

bool Ferry::Run(const Collective& call, const Load& load, WaitPoint::Deadline deadline) {
  for (int64_t step = 0; step < std::min<int64_t>(kSlots, load.steps); ++step) Expect(load, step);
  constexpr int64_t kAhead = kSlots - 1;
  for (int64_t step = 0; step < load.steps + kAhead; ++step) {
    if (step < load.steps && !Send(call, load, step, deadline)) return false;
    const int64_t arrived = step - kAhead;
    if (arrived < 0) continue;
    if (!AwaitAll(call, kSlots, arrived, deadline) || !load.consume(arrived)) return false;
    if (arrived + kSlots < load.steps) Expect(load, arrived + kSlots);
  }
  for (int64_t step = std::max<int64_t>(0, load.steps - kSlots); step < load.steps; ++step) {
    if (!AwaitAll(call, 0, step, deadline)) return false;
  }
  return true;
}

void Ferry::Expect(const Load& load, int64_t step) {
  for (const int peer : group_.others()) {
    const int64_t bytes = load.received_bytes(peer, step);
    if (bytes == 0) continue;
    group_.port().Receive(Expected(peer, step), group_.world_rank(peer), group_.data_tag(), memory_,
                          Slot(kSlots, peer, step), bytes);
  }
}

bool Ferry::Send(const Collective& call, const Load& load, int64_t step,
                 WaitPoint::Deadline deadline) {
  if (!AwaitAll(call, 0, step, deadline)) return false;
  const std::byte* common = nullptr;
  for (const int peer : group_.others()) {
    const int64_t bytes = load.sent_bytes(peer, step);
    if (bytes == 0) continue;
    const std::byte* slot = common;
    if (slot == nullptr) {
      std::byte* const filled = Slot(0, peer, step);
      if (!load.fill(peer, step, filled)) return false;
      slot = filled;
      if (load.same_for_all) common = slot;
    }
    group_.port().SendToBeTaken(Sent(peer, step), group_.world_rank(peer), group_.data_tag(),
                                memory_, slot, bytes);
  }
  return true;
}

bool Ferry::AwaitAll(const Collective& call, int first, int64_t step,
                     WaitPoint::Deadline deadline) {
  const auto all = [&] {
    bool complete = true;
    for (const int peer : group_.others()) complete = Message(first, peer, step).Test() && complete;
    return complete;
  };
  if (all()) return true;
  if (group_.Await(all, deadline)) return true;
  if (group_.failed()) return false;
  std::vector<int> late;
  for (const int peer : group_.others()) {
    if (Message(first, peer, step).is_under_way()) late.push_back(peer);
  }
  group_.FailLate(call, group_.RankNames(late));
  return false;
}

}  // namespace ebb
