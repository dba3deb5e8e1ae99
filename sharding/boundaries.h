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
  int writer = -1, reader = -1;  // forward scopes: of the visit, and of the next visit
  // The next visit's first scope that reads the boundary again: its backward or a recompute. -1 if
  // a recompute of the visit itself comes before, because that writes the boundary anew.
  int again = -1;
};

// A boundary stays so many ticks after its last use in forward, and comes back so many ticks before
// its next use: the ticks of one scope, if scopes follow each other.
inline constexpr int kBoundaryAhead = 2;

// By visit, the uses in the round that scope `first` begins.
std::vector<BoundaryUse> UsesInRound(const std::vector<PlannedScope>& scopes, size_t first,
                                     int visits);
// Whether other blocks can use the boundary's memory meanwhile, so that the transfer pays.
bool LeavesDevice(const std::vector<PlannedScope>& scopes, const BoundaryUse& use);

// By tick, the visits with outputs that leave the device, are read from the swap file (where they
// live there) and come back. `leaves`: by visit, whether its output may.
struct BoundaryTicks {
  std::vector<std::vector<int>> leaving, reading, coming;
};
BoundaryTicks TicksOfBoundaries(const std::vector<PlannedScope>& scopes,
                                const std::vector<bool>& leaves);

}  // namespace ebb::sharding
