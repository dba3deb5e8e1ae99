// What stands in the way of a scope that is opened before the plan's moment for it: a plan has room for
// some things only one after the other. In the declared order it never has both at once; whoever leaves
// that, or keeps a scope open over others, asks here first.
//
//   gather pool, prefetch_depth 0   | 0 |        prefetch_depth 1   | 0 | 1 |
//                                   | 1 |                           | 2 | 3 |
//
// Here 0 and 1 conflict, and 0 and 2. Nothing here remembers anything: `issued`, by operation of the
// plan, says how far a step has come; 0: not yet.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// Bytes [begin, end) of the gather pool that a unit is gathered into; not of one that is kept whole.
std::pair<int64_t, int64_t> GatherMemory(const Plan& plan, int unit);
// Bytes [begin, end) of the gradient pool that a backward of this visit and unit writes.
std::pair<int64_t, int64_t> GradientMemory(const Plan& plan, const PlannedScope& scope);

// Whether two units cannot both be gathered. A unit does not conflict with itself.
bool GathersConflict(const Plan& plan, int unit, int other);

// Whether backward of `scope` would write over the gradient of `other`, which nothing has reduced
// yet. One visit's gradients do, unless they are summed where they lie. Of both, visit and unit count.
bool GradientsConflict(const Plan& plan, const PlannedScope& scope, const PlannedScope& other);

// The first scope before `scope`, a backward of the plan, whose gradient conflicts with its and whose
// reduction is not issued; -1: none.
int UnreducedInTheWay(const Plan& plan, std::span<const uint8_t> issued, int scope);

// The updates that the step before may have left to this one, with all that belongs to them, in order.
std::vector<int> CarriedOperations(const Plan& plan);

// Into `needs`: what is not issued yet and has to be for `operation` to be, itself among it, in the
// plan's order. What it comes after, directly or not, but for the marks of scopes; what fills secondary
// shards from a gather, with that gather; and all before it of
// `carried`, CarriedOperations(): they wait for no scope, and what their streams bring lies in slots that
// come in turns. Takes time for what it finds, not for the plan.
void FindNeeds(const Plan& plan, std::span<const uint8_t> issued, std::span<const int> carried,
               int operation, std::vector<int>& needs);

// Whether one of `needs` would take a slot whose content somebody is still to use who comes before it in
// the plan and is not among them: an update, or a gather, that waits for a scope to close.
bool TakesHeldSlot(const Plan& plan, std::span<const uint8_t> issued, std::span<const int> needs);

// The first of the operations that `waits` name, other than marks, that is not issued; -1: all are. Who
// waited for it would see what was there before.
int NotIssued(const Plan& plan, std::span<const uint8_t> issued, std::span<const Dependency> waits);

}  // namespace ebb::sharding
