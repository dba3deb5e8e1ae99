// When units that are kept in slices are gathered and released. Says which scopes one gather
// serves, how early it is issued, and which gathers are submitted as one group.
//
//   depth 1      open F0   open F1        open F2
//   gather       F0, F1    F2             F3 ...
//
// The slots of F0 and F2 may share memory. A scope that stays open over others has its own slot.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ebb/sharding/passes/pool.h"
#include "ebb/sharding/scopes.h"

namespace ebb::sharding {

// A unit in its slot, from the gather to the close of the last scope that uses it.
struct ResidencyInterval {
  int unit = 0;
  int first = 0, last = 0;  // scopes, as they open
  int end = 0;              // tick of the last close among them
  // With secondary shards: the first of several intervals fills them, and the others gather from
  // them.
  bool fills_secondary = false, from_secondary = false;
};

struct GatherGroup {
  std::vector<int> intervals;   // indices into Residency::intervals, in order of first use
  bool from_secondary = false;  // all of them, or none
  int issue = 0;                // tick
};

struct Residency {
  std::vector<ResidencyInterval> intervals;
  std::vector<GatherGroup> groups;
  // Lifetimes of each unit's slot; none for a unit that is kept whole.
  std::vector<std::vector<Lifetime>> lifetimes;
};

struct ResidencyLimits {
  int64_t prefetch_depth = 1;             // units gathered ahead of the one in use
  int64_t prefetch_elements = INT64_MAX;  // no further prefetch once this much is ahead
  int64_t live_elements = INT64_MAX;      // no prefetch that would gather more than this
  int64_t reuse_elements = INT64_MAX;     // a unit with a farther next use is released
  int64_t group_elements = 0;  // neighbours are gathered together up to this; larger ones are alone
  // If slices are read from a swap file: the elements that each unit takes of a slot, and the most
  // elements of a slot. A group shares one slot.
  std::vector<int64_t> slot_elements = {};  // by unit; empty: nothing is read
  int64_t slot_elements_max = INT64_MAX;
  bool reshard_after_forward = true;
  bool has_secondary =
      false;  // shards within a group of ranks, for all gathers of a unit but its first
};

// `elements[u]` of unit u's flat buffers; units with kept_whole[u] are never gathered.
// Deterministic, the same on every rank.
Residency PlanResidency(std::span<const PlannedScope> scopes, std::span<const int64_t> elements,
                        const std::vector<bool>& kept_whole, const ResidencyLimits& limits);

// Marks the last close of each interval.
void MarkReleases(const Residency& residency, std::span<PlannedScope> scopes);

}  // namespace ebb::sharding
