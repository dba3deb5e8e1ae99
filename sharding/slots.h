// Slots: memory that parts of a class pass through if they live elsewhere.
#pragma once

#include <cstdint>

#include "ebb/sharding/place.h"

namespace ebb::sharding {

// Equal slots, used in turns.
struct SlotRing {
  int count = 0;
  int64_t bytes = 0;  // of a slot
  Place first;

  Place Slot(int turn) const { return first.Plus(turn % count * bytes); }
};

// Gives out the slots of a ring, one behind the other.
class SlotTurns {
 public:
  explicit SlotTurns(const SlotRing& ring) : ring_(ring) {}
  Place Next() { return ring_.Slot(next_++); }
  // Starts from the first slot, as every round does that repeats the round before.
  void Restart() { next_ = 0; }

 private:
  const SlotRing& ring_;
  int next_ = 0;
};

// A sub-group's offsets in a slot while it is updated; -1 for arrays that always live where the
// update runs.
struct WorkSlots {
  SlotRing ring;
  int64_t master = -1, states = -1, states_stride = 0, gradient = -1, parameter = -1;
};

}  // namespace ebb::sharding
