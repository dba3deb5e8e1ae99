#include "ebb/sharding/swap_files.h"

#include <algorithm>

namespace ebb::sharding {
namespace {

// The unit of each visit.
std::vector<int> UnitsOfVisits(const Plan& plan) {
  std::vector<int> units(static_cast<size_t>(plan.table.visits), 0);
  for (const PlannedScope& scope : plan.scopes) units[scope.visit] = scope.unit;
  return units;
}

// The part of an extent that one transfer moves: all of it, or what one sub-group updates.
void AddExtents(const Table& table, const Array& row, const Extent& stored, SwapExtent extent,
                SwapFiles& files) {
  const auto add = [&](int64_t begin, int64_t end) {
    if (begin >= end) return;
    extent.place = stored.place.Plus((begin - stored.begin) * row.encoding.code_bytes());
    extent.bytes = row.encoding.bytes(end - begin);
    files.extents.push_back(extent);
  };
  const bool is_updated = FactsOf(row.purpose).of != ArrayOf::kVisit && row.trainable;
  if (!is_updated) return add(stored.begin, stored.end);
  for (const SubGroup& group : table.SubGroupsOf(row.of))
    add(std::max(group.begin, stored.begin), std::min(group.end, stored.end));
}

void AddArrays(const Table& table, SwapFiles& files) {
  for (size_t g = 0; g < table.sub_groups.size(); ++g) {
    const SubGroup& group = table.sub_groups[g];
    std::vector<SwapFiles::Array>& arrays = files.sub_groups.emplace_back();
    if (group.tier != Tier::kNvme) continue;
    files.sub_group_elements_max = std::max(files.sub_group_elements_max, group.count());
    for (const int row : table.UpdatedRows(group.unit)) {
      const Place place = table.PlaceOfSubGroup(row, static_cast<int>(g));
      const bool is_kept = table[row].elements > 0;
      arrays.push_back({place, is_kept ? table[row].encoding.bytes(group.count()) : 0});
    }
  }
}

}  // namespace

SwapFiles LayOutSwapFiles(const Plan& plan) {
  SwapFiles files;
  AddArrays(plan.table, files);
  const std::vector<int> units = UnitsOfVisits(plan);
  for (size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Array& row = plan.table.rows[r];
    const StateClass what = FactsOf(row.purpose).counted;
    const bool of_visit = FactsOf(row.purpose).of == ArrayOf::kVisit;
    const int unit = of_visit ? units[row.of] : row.of;
    // Parameters that are masters or halves of them are state of the optimizer's.
    const bool is_state =
        what == StateClass::kMaster || what == StateClass::kOptimizer ||
        (what == StateClass::kParameter && row.trainable && plan.decisions.reads_parameters(unit));
    for (const Extent& stored : plan.table.ExtentsOf(static_cast<int>(r))) {
      if (stored.place.tier != Tier::kNvme) continue;
      AddExtents(plan.table, row, stored,
                 {.what = what,
                  .unit = unit,
                  .place = {},
                  .is_state = is_state,
                  .trainable = row.trainable},
                 files);
    }
  }
  return files;
}

}  // namespace ebb::sharding
