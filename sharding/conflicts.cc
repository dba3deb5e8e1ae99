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

std::vector<int> CarriedOperations(const Plan& plan) {
  std::vector<int> carried;
  for (size_t i = 0; i < plan.operations.size(); ++i)
    if (plan.operations[i].condition == Condition::kCarrying)
      carried.push_back(static_cast<int>(i));
  return carried;
}

void FindNeeds(const Plan& plan, std::span<const uint8_t> issued, std::span<const int> carried,
               int operation, std::vector<int>& needs) {
  needs.clear();
  for (int i : carried)
    if (i <= operation && !issued[static_cast<size_t>(i)]) needs.push_back(i);
  const auto others = std::ssize(needs);
  const auto add = [&](int i) {
    const Operation& o = plan.operations[static_cast<size_t>(i)];
    const bool of_scope = o.kind == OperationKind::kMark && !o.of_update;
    if (issued[static_cast<size_t>(i)] || of_scope ||
        std::binary_search(needs.begin(), needs.begin() + others, i) ||
        std::find(needs.begin() + others, needs.end(), i) != needs.end())
      return;
    needs.push_back(i);
  };
  add(operation);
  const auto fills_secondary = [&](int i) {
    return i < std::ssize(plan.operations) &&
           plan.operations[static_cast<size_t>(i)].kind == OperationKind::kFillSecondary;
  };
  for (size_t next = 0; next < needs.size(); ++next) {
    // Right behind its gather: what is gathered to the same place next may come before the plan's turn.
    if (fills_secondary(needs[next] + 1)) add(needs[next] + 1);
    if (fills_secondary(needs[next])) add(needs[next] - 1);
    for (const Dependency& dependency : plan.operations[static_cast<size_t>(needs[next])].after)
      if (dependency.kind == Dependency::kOperation) add(dependency.index);
  }
  std::sort(needs.begin(), needs.end());
}

bool TakesHeldSlot(const Plan& plan, std::span<const uint8_t> issued, std::span<const int> needs) {
  const auto first = std::find(issued.begin(), issued.end(), uint8_t{0}) - issued.begin();
  const auto holds = [&](int before, int slot) {
    const Operation& o = plan.operations[static_cast<size_t>(before)];
    return !issued[static_cast<size_t>(before)] && o.condition == Condition::kAlways &&
           std::find(o.frees.begin(), o.frees.end(), slot) != o.frees.end() &&
           !std::binary_search(needs.begin(), needs.end(), before);
  };
  for (int operation : needs) {
    for (const Dependency& dependency : plan.operations[static_cast<size_t>(operation)].after) {
      if (dependency.kind != Dependency::kSlotFree) continue;
      for (int before = static_cast<int>(first); before < operation; ++before)
        if (holds(before, dependency.index)) return true;
    }
  }
  return false;
}

int NotIssued(const Plan& plan, std::span<const uint8_t> issued,
              std::span<const Dependency> waits) {
  for (const Dependency& dependency : waits) {
    if (dependency.kind != Dependency::kOperation) continue;
    const auto index = static_cast<size_t>(dependency.index);
    if (!issued[index] && plan.operations[index].kind != OperationKind::kMark)
      return dependency.index;
  }
  return -1;
}

}  // namespace ebb::sharding
