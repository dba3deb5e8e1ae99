// Boundary activations that leave the device between forward and backward: written by one visit,
// read by the next one's forward, and not again before that one's backward, or a recompute of it.
//
//   device   | F1 writes, F2 reads, leaves under F3 |   ...   | comes under B3, B2 reads |
//   below                                     | ................ |
#pragma once

#include <vector>

#include "ebb/sharding/scopes.h"

namespace ebb::sharding {

// One round's scopes of one boundary; -1: there is none.
struct BoundaryUse {
  int writer = -1, reader = -1;  // forward of the visit, and of the next
  // Of the next: the first to read it again, its backward or a recompute. None where the visit is recomputed
  // before, which writes it anew.
  int again = -1;
};

// Ticks that a boundary stays for after its last use in forward, and comes before it is needed: those of one scope,
// where they follow each other.
inline constexpr int kBoundaryAhead = 2;

// By visit, the uses in the round that scope `first` begins.
std::vector<BoundaryUse> UsesInRound(const std::vector<PlannedScope>& scopes, size_t first,
                                     int visits);
// Whether it is worth its way: its memory is another's meanwhile.
bool LeavesDevice(const std::vector<PlannedScope>& scopes, const BoundaryUse& use);

// By tick, the visits with outputs that leave the device, are read from the swap file (where they
// live there) and come back. `leaves`: by visit, whether its output may.
struct BoundaryTicks {
  std::vector<std::vector<int>> leaving, reading, coming;
};
BoundaryTicks TicksOfBoundaries(const std::vector<PlannedScope>& scopes,
                                const std::vector<bool>& leaves);

}  // namespace ebb::sharding
