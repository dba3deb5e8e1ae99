#include "ebb/runtime/comm/mpi/letters.h"

#include <algorithm>
#include <cstring>

#include "ebb/runtime/comm/mpi/group.h"

namespace ebb {

Letters::Letters(MpiGroup& group, int tag, size_t bytes)
    : group_(group),
      tag_(tag),
      bytes_(bytes),
      memory_(new std::byte[3 * bytes * static_cast<size_t>(group.size())]()),
      pairs_(static_cast<size_t>(group.size())) {
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer != group_.rank()) Expect(peer);
  }
}

std::byte* Letters::Place(int peer, int which) const {
  return memory_.get() + (3 * static_cast<size_t>(peer) + static_cast<size_t>(which)) * bytes_;
}

const void* Letters::From(int peer) const {
  return Place(peer, 0);
}

void Letters::Expect(int peer) {
  group_.port().Receive(pairs_[static_cast<size_t>(peer)].incoming, group_.world_rank(peer), tag_,
                        memory_, Place(peer, 0), static_cast<int64_t>(bytes_));
}

Letters::Meeting Letters::Meet(std::span<const int> peers, const void* mine,
                               WaitPoint::Deadline deadline,
                               absl::FunctionRef<bool(int peer)> arrived,
                               absl::FunctionRef<bool()> goes_on, const Waits& waits) {
  for (const int peer : peers) {
    Pair& pair = pairs_[static_cast<size_t>(peer)];
    const int which = static_cast<int>(pair.sent % 2);
    MpiMessage& outgoing = pair.outgoing[which];
    // The letter of two meetings ago: the peer has answered it.
    if (!group_.Await([&] { return outgoing.Test(); }, deadline)) {
      if (group_.failed()) return {.outcome = Outcome::kFailed, .absent = {}};
      return {.outcome = Outcome::kLate, .absent = {peer}};
    }
    std::memcpy(Place(peer, 1 + which), mine, bytes_);
    group_.port().Send(outgoing, group_.world_rank(peer), tag_, memory_, Place(peer, 1 + which),
                       static_cast<int64_t>(bytes_));
    ++pair.sent;
  }
  bool fits = true;
  size_t missing = peers.size();
  int gone = -1;
  const auto look = [&] {
    for (const int peer : peers) {
      Pair& pair = pairs_[static_cast<size_t>(peer)];
      if (pair.here) continue;
      // Before the look for its letter: one that has left has sent its last by then.
      const bool has_left = group_.HasLeft(peer, *this, pair.received);
      pair.here = pair.incoming.Test();
      if (pair.here) {
        --missing;
        fits = fits && arrived(peer);
      } else if (has_left && gone < 0) {
        gone = peer;
      }
    }
    return missing == 0 || !fits || gone >= 0 || !goes_on();
  };
  const bool done = group_.Await(look, deadline, waits.options.notices, [&](double seconds) {
    group_.SayWaiting(Absent(peers), seconds, waits);
  });
  // A failure that is known counts also where all letters have come: it is older than they are.
  if (!fits || !goes_on() || group_.failed()) return {.outcome = Outcome::kFailed, .absent = {}};
  if (missing == 0) return {};
  if (done) return {.outcome = Outcome::kLeft, .absent = {gone}};
  return {.outcome = Outcome::kLate, .absent = Absent(peers)};
}

std::vector<int> Letters::Absent(std::span<const int> peers) const {
  std::vector<int> absent;
  for (const int peer : peers) {
    if (!pairs_[static_cast<size_t>(peer)].here) absent.push_back(peer);
  }
  return absent;
}

void Letters::Next(std::span<const int> peers) {
  for (const int peer : peers) {
    Pair& pair = pairs_[static_cast<size_t>(peer)];
    pair.here = false;
    ++pair.received;
    Expect(peer);
  }
}

}  // namespace ebb
