// Collectives in one level: every rank sends to every other just what that one needs, whichever
// hosts they are on. Reductions move what ranks send, unreduced, so any reduction group is right.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/mpi/ferry.h"
#include "ebb/runtime/comm/mpi/group.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class Flat {
 public:
  Flat(MpiGroup& group, Ferry& ferry);

  // False: the group has failed.
  bool Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool Exchange(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);

 private:
  // An all-reduced row is cut into one part a rank.
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };
  bool CopyToAll(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool Scatter(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool ReduceParts(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool GatherParts(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  Range PartOf(int rank, int64_t elements) const;
  // Of `begin` and what follows, the elements that step `step` moves.
  Range StepOf(const Collective& call, Range range, int64_t step) const;
  int64_t Steps(const Collective& call, int64_t elements) const;

  MpiGroup& group_;
  Ferry& ferry_;
  std::vector<const void*> inputs_;  // of a reduction, by rank
};

}  // namespace ebb
