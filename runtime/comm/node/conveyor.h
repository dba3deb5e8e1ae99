// Moves the elements of collectives between processes of a host, through rings of slots in shared
// memory. In step s a rank stages for the others what they need of its own memory, in the s-th slot
// of its ring, while it reads what they have staged two steps before:
//
//   rank 0   stage 0 | stage 1 | stage 2  read 0 | stage 3  read 1 | ...
//   rank 1   stage 0 | stage 1 | stage 2  read 0 | stage 3  read 1 | ...
//
// Ranks wait for each other only where a slot is not full or not empty yet. Bytes per element that
// reach memory are those of a copy: sent elements are read once, received ones written once, what
// is between stays in the caches. Reductions read all inputs of a step at once, so the order of
// sums is that of communicator.h whatever the steps are.
//
// The elements are cut into lanes, one for each thread that all ranks can spare, with rings of
// their own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/node/group.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class Conveyor {
 public:
  explicit Conveyor(NodeGroup& group);

  // What this rank does once all have called the same. False: the group has failed.
  bool Run(const Collective& call, int lanes, WaitPoint::Deadline deadline, ThreadTeam& team);

 private:
  // What a lane keeps between operations.
  struct Lane {
    ThreadTeam thread{1};             // the lane's own
    std::vector<const void*> inputs;  // of a reduction, by rank
    NodeGroup::Spin spin;
  };
  class Pass;

  NodeGroup& group_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace ebb
