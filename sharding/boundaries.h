// Boundary activations that leave the device between forward and backward: written by one visit,
// read by the next one's forward, and not again before that one's backward.
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
  int backward = -1;             // of the next: reads it again
};

// Scopes that a boundary stays for after its last use in forward, and comes before it is needed.
inline constexpr int kBoundaryAhead = 1;

// By visit, the uses in the round that scope `first` begins.
std::vector<BoundaryUse> UsesInRound(const std::vector<PlannedScope>& scopes, size_t first,
                                     int visits);
// Whether it is worth its way: its memory is another's meanwhile.
bool LeavesDevice(const BoundaryUse& use);

}  // namespace ebb::sharding
