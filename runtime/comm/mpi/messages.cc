#include "ebb/runtime/comm/mpi/messages.h"

#include <algorithm>

#include "ebb/runtime/comm/mpi/communicator.h"

namespace ebb {
namespace {

// Large enough for the network's bandwidth, and small enough in a large communicator.
int64_t SlotBytes(int ranks, int slots) {
  constexpr int64_t kLargest = int64_t{512} << 10, kSmallest = int64_t{64} << 10;
  constexpr int64_t kTogether = int64_t{32} << 20;
  return std::clamp(kTogether / (int64_t{ranks} * slots) / kSmallest * kSmallest, kSmallest,
                    kLargest);
}

}  // namespace

MpiMessages::MpiMessages(MpiCommunicator& communicator, int size)
    : communicator_(communicator),
      size_(size),
      slot_bytes_(SlotBytes(size, 2 * kSlots)),
      // Not initialised, so that slots that are never used take no pages.
      memory_(new std::byte[static_cast<size_t>(2 * kSlots * size * slot_bytes_)]),
      messages_(static_cast<size_t>(2 * kSlots * size)) {}

bool MpiMessages::TestAll() {
  bool complete = true;
  for (MpiMessage& message : messages_) complete = message.Test() && complete;
  return complete;
}

std::byte* MpiMessages::Slot(int first, int peer, int64_t step) const {
  return memory_.get() + (int64_t{2 * kSlots} * peer + first + step % kSlots) * slot_bytes_;
}

MpiMessage& MpiMessages::Message(int first, int peer, int64_t step) {
  return messages_[static_cast<size_t>(int64_t{2 * kSlots} * peer + first + step % kSlots)];
}

bool MpiMessages::Run(const Collective& call, const Load& load, WaitPoint::Deadline deadline) {
  for (int64_t step = 0; step < std::min<int64_t>(kSlots, load.steps); ++step) Expect(load, step);
  constexpr int64_t kAhead = kSlots - 1;
  for (int64_t step = 0; step < load.steps + kAhead; ++step) {
    if (step < load.steps && !Send(call, load, step, deadline)) return false;
    const int64_t arrived = step - kAhead;
    if (arrived < 0) continue;
    if (!AwaitAll(call, kSlots, arrived, deadline)) return false;
    load.consume(arrived);
    if (arrived + kSlots < load.steps) Expect(load, arrived + kSlots);
  }
  for (int64_t step = std::max<int64_t>(0, load.steps - kSlots); step < load.steps; ++step) {
    if (!AwaitAll(call, 0, step, deadline)) return false;
  }
  return true;
}

void MpiMessages::Expect(const Load& load, int64_t step) {
  for (const int peer : communicator_.others()) {
    const int64_t bytes = load.received_bytes(peer, step);
    if (bytes == 0) continue;
    communicator_.endpoint().Receive(Message(kSlots, peer, step), communicator_.world_rank(peer),
                                     communicator_.data_tag(), memory_, Slot(kSlots, peer, step),
                                     bytes);
  }
}

bool MpiMessages::Send(const Collective& call, const Load& load, int64_t step,
                       WaitPoint::Deadline deadline) {
  if (!AwaitAll(call, 0, step, deadline)) return false;
  const std::byte* common = nullptr;
  for (const int peer : communicator_.others()) {
    const int64_t bytes = load.sent_bytes(peer, step);
    if (bytes == 0) continue;
    const std::byte* slot = common;
    if (slot == nullptr) {
      std::byte* const filled = Slot(0, peer, step);
      load.fill(peer, step, filled);
      slot = filled;
      if (load.same_for_all) common = slot;
    }
    communicator_.endpoint().Send(Message(0, peer, step), communicator_.world_rank(peer),
                                  communicator_.data_tag(), memory_, slot, bytes,
                                  /*to_be_taken=*/true);
  }
  return true;
}

bool MpiMessages::AwaitAll(const Collective& call, int first, int64_t step,
                           WaitPoint::Deadline deadline) {
  const auto all = [&] {
    bool complete = true;
    for (const int peer : communicator_.others())
      complete = Message(first, peer, step).Test() && complete;
    return complete;
  };
  if (all()) return true;
  std::vector<int> late;
  const auto absent = [&] {
    late.clear();
    for (const int peer : communicator_.others()) {
      if (Message(first, peer, step).is_under_way()) late.push_back(peer);
    }
    return late;
  };
  return communicator_.Await(call, all, absent, deadline);
}

}  // namespace ebb
