// Collectives in one level: every rank sends to every other just what that one needs, whichever
// hosts they are on. Reductions move what ranks send, unreduced, so any reduction group is right.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/mpi/ferry.h"
#include "ebb/runtime/comm/mpi/group.h"
#include "ebb/runtime/comm/mpi/row.h"
#include "ebb/runtime/comm/reduce.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class Flat {
 public:
  Flat(MpiGroup& group, Ferry& ferry);

  // False: the group has failed.
  bool Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool Exchange(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);

 private:
  bool CopyToAll(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool Scatter(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool ReduceParts(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool GatherParts(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  // What has come of `range` in a step, and of this rank's own what is in block `block` of its sent
  // memory.
  void SumReceived(const Row& row, RowRange range, const Reduction& reduction, int64_t step,
                   int64_t block, ThreadTeam& team);
  // An all-reduced row is cut into one part a rank, none longer than the first.
  RowRange PartOf(int rank, int64_t elements) const;
  RowSteps StepsOf(const Row& row, RowRange range) const {
    return {range, ferry_.slot_bytes() / row.element_bytes()};
  }

  MpiGroup& group_;
  Ferry& ferry_;
  std::vector<const void*> inputs_;  // of a reduction, by rank
};

}  // namespace ebb
