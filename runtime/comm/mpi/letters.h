// Small messages of one size that ranks send each other in pairs, one stream a pair: what a rank
// calls, and what it proposes to create. Rank r's n-th letter to s answers s's n-th to r, so a rank
// that waits for the others' letters meets them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/mpi/port.h"

namespace ebb {

class MpiGroup;

class Letters {
 public:
  enum class Outcome : uint8_t { kMet, kFailed, kLeft, kLate };
  struct Meeting {
    Outcome outcome = Outcome::kMet;
    std::vector<int> absent;  // ranks that have left, or are late
  };

  // In what a rank waits, for messages, given the names of those that are absent.
  struct Waits {
    const CommunicatorOptions& options;
    CollectiveKind kind;  // says for which ranks one rank speaks in the log (SpeaksFor)
    absl::FunctionRef<std::string(std::string_view names)> text;
  };

  Letters(MpiGroup& group, int tag, size_t bytes);

  // Sends `mine` to `peers` and waits for theirs. `arrived` sees each; false from it, or from
  // `goes_on`, ends the waiting with kFailed.
  Meeting Meet(std::span<const int> peers, const void* mine, WaitPoint::Deadline deadline,
               absl::FunctionRef<bool(int peer)> arrived, absl::FunctionRef<bool()> goes_on,
               const Waits& waits);
  // What `peer` has sent, until Next.
  const void* From(int peer) const;
  // The letters have been read; the next may come.
  void Next(std::span<const int> peers);

  // How many letters `peer` has got: a rank that leaves says so to it.
  uint64_t sent(int peer) const { return pairs_[static_cast<size_t>(peer)].sent; }

 private:
  struct Pair {
    MpiMessage incoming;
    MpiMessage outgoing[2];
    uint64_t sent = 0;
    uint64_t received = 0;
    bool here = false;
  };
  std::byte* Place(int peer, int which) const;
  std::vector<int> Absent(std::span<const int> peers) const;
  void Expect(int peer);

  MpiGroup& group_;
  const int tag_;
  const size_t bytes_;
  const MessageMemory memory_;  // by peer: the one that comes, two that go
  std::vector<Pair> pairs_;
};

}  // namespace ebb
