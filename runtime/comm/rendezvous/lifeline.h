// Notices the end of other ranks' processes, for as long as it exists: a thread that sleeps until
// a process of this host has ended (pidfd), a connection has closed, or rank 0 passes on that one
// of its has.
#pragma once

#include <poll.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "ebb/runtime/comm/rendezvous/participant.h"

namespace ebb {

class Lifeline {
 public:
  // `ended` is called on the lifeline's thread, at least once for every rank whose process has
  // ended without having said goodbye to this one; of one that ends in order too if its host shows
  // that first. `connections`: of a Rendezvous.
  static absl::StatusOr<std::unique_ptr<Lifeline>> Hold(int rank,
                                                        std::vector<Participant> participants,
                                                        std::vector<Connection> connections,
                                                        std::function<void(int rank)> ended);
  // Says goodbye and lets go.
  ~Lifeline();

 private:
  Lifeline(int rank, std::vector<Participant> participants, std::vector<Connection> connections,
           std::function<void(int rank)> ended);
  void Watch();
  // False: nothing more will come.
  bool HearFrom(size_t connection);
  void PassOn(int gone);

  const int rank_;
  const std::vector<Participant> participants_;
  std::vector<Connection> connections_;
  std::vector<Descriptor> processes_;  // by rank
  const std::function<void(int rank)> ended_;
  Descriptor stop_;
  std::vector<pollfd> polled_;  // of the thread, which allocates nothing
  std::thread thread_;
};

}  // namespace ebb
