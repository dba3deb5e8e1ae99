// Sends and receives between two processes of a host. Each side posts its call and waits for the
// other's; the sender then stages its elements in its exchange ring, the receiver reads them.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/node/group.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class Exchange {
 public:
  explicit Exchange(NodeGroup& group);

  // False: the group has failed.
  bool Run(const Collective& call, WaitPoint::Deadline deadline);

  // For a rank that has come to an operation of all: a rank calls in one order, so a peer that
  // waits for it in a send or receive will never come there. True: the group has failed.
  bool FailIfAwaited(const CallSummary& mine);
  // What `FailIfAwaited` would find.
  int Awaiting();

 private:
  bool Meet(const Collective& call, WaitPoint::Deadline deadline);
  bool Send(const Collective& call, WaitPoint::Deadline deadline);
  bool Receive(const Collective& call, WaitPoint::Deadline deadline);

  NodeGroup& group_;
  std::vector<uint64_t> numbers_;  // of exchanges with each peer
  ThreadTeam thread_{1};
  NodeGroup::Spin spin_;
};

}  // namespace ebb
