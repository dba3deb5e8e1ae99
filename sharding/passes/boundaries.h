// Boundary activations that leave the device between forward and backward. One visit writes a
// boundary and the forward of the next visit reads it. The next reader is that visit's backward or
// its recompute.
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
  // The first later scope that reads the boundary again: the next visit's backward or recompute. -1
  // if the visit itself is recomputed before, because that writes the boundary again.
  int again = -1;
};

// A boundary leaves this many ticks after its last use in forward, and comes back this many ticks
// before its next use. Both are the ticks of one scope, if scopes follow each other.
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
