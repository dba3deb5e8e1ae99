// Slots: staging memory for parts of a class that are kept on another tier.
#pragma once

#include <cstdint>

#include "ebb/sharding/place.h"

namespace ebb::sharding {

// Equal slots, used round-robin.
struct SlotRing {
  int count = 0;
  int64_t bytes = 0;  // of a slot
  Place first;

  Place Slot(int use) const { return first.Plus(use % count * bytes); }
};

// Gives out the slots of a ring, one after the other.
class SlotCursor {
 public:
  explicit SlotCursor(const SlotRing& ring) : ring_(ring) {}
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
