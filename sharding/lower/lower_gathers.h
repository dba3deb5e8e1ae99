// Gathers as operations. Data below the device is read into its slot in host memory, then copied to
// its place in the unit's slot on the device, then gathered there.
//
// With secondary shards (hpZ) a unit's first gather is over all its slices, and each rank keeps a
// part of the unit. The step's later gathers are of those parts, within a group of ranks:
//
//   gather over 4 ranks     | 0 | 1 | 2 | 3 |
//   filled on the ranks     | 0     | 1     |   of each group of 2
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ebb/sharding/lower/emit.h"
#include "ebb/sharding/lower/op_writer.h"

namespace ebb::sharding {

class GatherLowering {
 public:
  GatherLowering(const PassInputs& in, const SwapIns& swap_ins, OpWriter& writer)
      : in_(in),
        swap_ins_(swap_ins),
        d_(in.plan.decisions),
        table_(in.plan.table),
        writer_(writer),
        to_(writer.operands()) {}

  void Read(int swap_in);
  void Upload(int group);
  void Gather(int group);
  void Refresh(const std::vector<int>& units);

 private:
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;
  // Reads masters that an early update shares, and makes the copies that are gathered.
  void ReadMasters(const SwapIn& swap_in);
  void CastMasters(const SwapIn& swap_in);
  std::vector<int> SharedSubGroups(int unit) const;
  Place MasterSlotOf(int sub_group) const;
  // `carried`: reads what carried updates would bring, for a step without any.
  void ReadParameters(int swap_in, bool carried);
  Ranges NotCast(int swap_in, int unit, bool trainable, const Extent& piece) const;
  void Fill(const GatherGroup& group);
  void AddSecondary(int unit, bool fills);

  const PassInputs& in_;
  const SwapIns& swap_ins_;
  const Decisions& d_;
  const Table& table_;
  OpWriter& writer_;
  OperandWriter& to_;
};

}  // namespace ebb::sharding
