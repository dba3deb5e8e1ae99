// Collectives in two levels, where hosts have equally many ranks, numbered host by host: what
// crosses hosts does so between the ranks of a column, each of which moves its share, and shared
// memory does the rest.
//
//   all-gather       a column gathers its slices from all hosts; then each host gathers its columns
//   broadcast        along the root's column; then on each host
//   reduce-scatter   for each host, the ranks of this one sum their slices of that one's ranks, in
//                    fp32, and send the sums along the columns; the owner adds them in host order:
//                    the order of sums of a reduction group that is a host's ranks
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/mpi/ferry.h"
#include "ebb/runtime/comm/mpi/group.h"
#include "ebb/runtime/comm/mpi/row.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class Grid {
 public:
  Grid(MpiGroup& group, Ferry& ferry);

  bool Serves(const Collective& call) const;
  // False: the group has failed.
  bool Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);

 private:
  int width() const { return group_.hosts().width(); }
  int hosts() const { return group_.hosts().count(); }
  int host() const { return group_.rank() / width(); }
  int column() const { return group_.rank() % width(); }
  bool IsInColumn(int rank) const { return rank % width() == column(); }

  bool AllGather(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool Broadcast(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  bool ReduceScatter(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team);
  // Sums this host's contributions to elements [begin, end) of this column's slices of `host`.
  bool SumFor(const Collective& call, int host, RowRange range, float* sums, ThreadTeam& team);
  // An operation of this host's ranks.
  bool RunOnNode(const Collective& call, ThreadTeam& team);

  MpiGroup& group_;
  Ferry& ferry_;
  std::vector<CollectiveSpan> spans_;  // of an operation of this host's ranks
  std::vector<float> own_sums_;
  std::vector<const void*> inputs_;  // of a reduction, by host
};

}  // namespace ebb
