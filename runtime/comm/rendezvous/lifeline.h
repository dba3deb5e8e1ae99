// Notices the end of other ranks' processes and of their launcher's, for as long as it exists: a
// thread that sleeps until a process of this host has ended (pidfd), a connection has closed, or
// rank 0 passes on that one of its has.
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "ebb/runtime/comm/rendezvous/participant.h"

namespace ebb {

// The process that has started this one.
struct ParentProcess {
  // Nothing if it has ended already or cannot be seen.
  static std::optional<ParentProcess> Find();

  int64_t pid = 0;
  Descriptor process;
};

class Lifeline {
 public:
  // Called on the lifeline's thread.
  struct Ends {
    // At least once for every rank whose process has ended without having said goodbye to this one;
    // of one that ends in order too if its host shows that first.
    std::function<void(int rank)> of_rank;
    std::function<void()> of_launcher;
  };
  // `connections`: of a Rendezvous. `launcher`: not open if there is none to watch.
  static absl::StatusOr<std::unique_ptr<Lifeline>> Hold(int rank,
                                                        std::vector<Participant> participants,
                                                        std::vector<Connection> connections,
                                                        Descriptor launcher, Ends ends);
  // Says goodbye and lets go.
  ~Lifeline();

 private:
  Lifeline(int rank, std::vector<Participant> participants, std::vector<Connection> connections,
           Descriptor launcher, Ends ends);
  void Watch();
  // False: nothing more will come.
  bool HearFrom(size_t connection);
  void PassOn(int gone);

  const int rank_;
  const std::vector<Participant> participants_;
  std::vector<Connection> connections_;
  std::vector<Descriptor> processes_;  // by rank
  Descriptor launcher_;
  const Ends ends_;
  Descriptor stop_;
  std::vector<pollfd> polled_;  // of the thread, which allocates nothing
  std::thread thread_;
};

}  // namespace ebb
