// What gathers need from the swap file, and in which of its slots in host memory it waits for them: a group of
// gathers in each, as many groups ahead as there are slots.
//
//   read      g0 g1 g2 | g3      g4
//   upload             g0    g1     g2        the slot of g0 is free for g3
//   gather                g0    g1     g2
//
// Where the updates of the step before are carried into this one, the first visit's parameters are
// not read: the update puts them into the slot.
//
// Where updates are early, the last gather of a unit and its update share a read. An update that
// reads parameters finds them in the slot, where it also leaves them. Of one that reads masters the
// masters are read instead of the parameters, into slots of their own; the gather has a copy.
#pragma once

#include <vector>

#include "ebb/sharding/passes.h"

namespace ebb::sharding {

struct ReadTurn {
  std::vector<int> units;    // of one group of gathers, in the order in which they lie in the slot
  int issue = 0, round = 0;  // tick and round of those gathers
  int number = 0;            // of the slot, not counting how many there are
  int after = -1;            // turn that has the slot before it; -1: none
  std::vector<int> updated;  // a carried update brings the parameters of these units
  // `shared`: units that this turn gathers last; their updates read this slot. `behind`: units that must be
  // updated before this turn is read.
  std::vector<int> shared = {}, behind = {};
};

struct ReadTurns {
  std::vector<ReadTurn> turns;  // in the order in which they are read
  std::vector<int> of_group;    // by group of gathers: its turn; -1: nothing to read
  // By unit: whether its update is carried from the step before; the turn with the slot that a
  // carried update leaves the parameters in, or the read that another update shares (-1: none).
  std::vector<bool> carried;
  std::vector<int> of_update;
  // By sub-group: the turn in Pools::master_slots of masters that are read for a gather and the update. -1: they
  // are not.
  std::vector<int> master_slot;

  bool shares_masters(int sub_group) const {
    return master_slot[static_cast<size_t>(sub_group)] >= 0;
  }
};

// Of a drain, a turn for each update that it runs.
ReadTurns PlanReadTurns(const PassInputs& in);

// Where in the slot of `turn` element `at` of a unit's slice lies.
Place InSlot(const Plan& plan, const ReadTurn& turn, int unit, bool trainable, int64_t at);

}  // namespace ebb::sharding
