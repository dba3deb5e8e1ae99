#include "ebb/sharding/conflicts.h"

#include <algorithm>

namespace ebb::sharding {
namespace {

bool Overlap(std::pair<int64_t, int64_t> a, std::pair<int64_t, int64_t> b) {
  return a.first < b.second && b.first < a.second;
}

}  // namespace

std::pair<int64_t, int64_t> GatherMemory(const Plan& plan, int unit) {
  const UnitAddresses& addresses = plan.pools.units[static_cast<size_t>(unit)];
  const Section& frozen = plan.layout.units[static_cast<size_t>(unit)].frozen;
  return {addresses.gather_trainable,
          addresses.gather_frozen + frozen.elements * SizeOf(plan.decisions.compute)};
}

std::pair<int64_t, int64_t> GradientMemory(const Plan& plan, const PlannedScope& scope) {
  const int64_t begin = plan.pools.visits[static_cast<size_t>(scope.visit)].gradient;
  const Section& section = plan.layout.units[static_cast<size_t>(scope.unit)].trainable;
  return {begin, begin + section.elements * SizeOf(plan.decisions.gradient)};
}

bool GathersConflict(const Plan& plan, int unit, int other) {
  const std::vector<bool>& kept_whole = plan.decisions.kept_whole;
  return unit != other && !kept_whole[unit] && !kept_whole[other] &&
         Overlap(GatherMemory(plan, unit), GatherMemory(plan, other));
}

bool GradientsConflict(const Plan& plan, const PlannedScope& scope, const PlannedScope& other) {
  const std::vector<bool>& trainable = plan.decisions.trainable;
  const bool summed = plan.decisions.keeps_step_gradients && scope.visit == other.visit;
  return !summed && trainable[scope.unit] && trainable[other.unit] &&
         Overlap(GradientMemory(plan, scope), GradientMemory(plan, other));
}

int UnreducedInTheWay(const Plan& plan, std::span<const uint8_t> issued, int scope) {
  const PlannedScope& writes = plan.scopes[static_cast<size_t>(scope)];
  for (int s = 0; s < scope; ++s) {
    const int reduce = plan.reduce_of_scope[static_cast<size_t>(s)];
    if (reduce >= 0 && !issued[static_cast<size_t>(reduce)] &&
        GradientsConflict(plan, writes, plan.scopes[static_cast<size_t>(s)]))
      return s;
  }
  return -1;
}

std::vector<int> NeedsOf(const Plan& plan, std::span<const uint8_t> issued, int operation) {
  std::vector<uint8_t> needed(static_cast<size_t>(operation) + 1, 0);
  needed.back() = 1;
  std::vector<int> needs;
  for (int i = operation; i >= 0; --i) {
    const Operation& o = plan.operations[static_cast<size_t>(i)];
    const bool of_scope = o.kind == OperationKind::kMark && !o.of_update;
    if (issued[static_cast<size_t>(i)] || of_scope ||
        (!needed[static_cast<size_t>(i)] && o.condition == Condition::kAlways))
      continue;
    needs.push_back(i);
    for (const Dependency& dependency : o.after)
      if (dependency.kind == Dependency::kOperation)
        needed[static_cast<size_t>(dependency.index)] = 1;
  }
  std::reverse(needs.begin(), needs.end());
  return needs;
}

bool TakeSlotsOfUpdates(const Plan& plan, std::span<const uint8_t> issued,
                        std::span<const int> operations) {
  const auto holds = [&](int update, int slot) {
    const Operation& o = plan.operations[static_cast<size_t>(update)];
    return !issued[static_cast<size_t>(update)] && o.of_update &&
           o.condition == Condition::kAlways &&
           std::find(o.frees.begin(), o.frees.end(), slot) != o.frees.end();
  };
  for (int operation : operations) {
    for (const Dependency& dependency : plan.operations[static_cast<size_t>(operation)].after) {
      if (dependency.kind != Dependency::kSlotFree) continue;
      for (int before = 0; before < operation; ++before)
        if (holds(before, dependency.index)) return true;
    }
  }
  return false;
}

}  // namespace ebb::sharding
