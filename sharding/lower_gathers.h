// Gathers as operations: what lives below the device is read into its slot in host memory, goes to its place in the
// unit's slot on the device, and is gathered there.
//
// With secondary shards (hpZ) the first gather of a unit is over all its slices, and each rank keeps a
// part of it for the gathers that follow in the step, which stay within a group of ranks:
//
//   gather over 4 ranks     | 0 | 1 | 2 | 3 |
//   filled on the ranks     | 0     | 1     |   of each group of 2
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ebb/sharding/plan_writer.h"
#include "ebb/sharding/read_turns.h"

namespace ebb::sharding {

class GatherLowering {
 public:
  GatherLowering(const PassInputs& in, const ReadTurns& turns, PlanWriter& writer)
      : in_(in), turns_(turns), d_(in.plan.decisions), writer_(writer) {}

  void Read(int turn);
  void Upload(int group);
  void Gather(int group);
  void Refresh(const std::vector<int>& units);

 private:
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;
  // Of the masters that an early update shares, and the copies of them that are gathered.
  void ReadMasters(const ReadTurn& turn);
  void NarrowMasters(const ReadTurn& turn);
  std::vector<int> SharedSubGroups(int unit) const;
  // `carried`: of what carried updates bring instead, if there are none.
  void ReadParameters(int turn, bool carried);
  Ranges NotNarrowed(int turn, int unit, bool trainable, const ParameterPiece& piece) const;
  void Fill(const GatherGroup& group);
  void AddSecondary(int unit, bool fills);

  const PassInputs& in_;
  const ReadTurns& turns_;
  const Decisions& d_;
  PlanWriter& writer_;
};

}  // namespace ebb::sharding
