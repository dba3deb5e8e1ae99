#include "ebb/sharding/table.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ebb/sharding/operands.h"

namespace ebb::sharding {

int64_t PoolBytes::state_file() const {
  const Classes& of = On(Tier::kNvme);
  return std::accumulate(of.begin(), of.end(), -of[static_cast<size_t>(StateClass::kParameter)]);
}

Array& Table::Add(const Array& row) {
  const bool by_tier = FactsOf(row.purpose).of == ArrayOf::kTier;
  int& first = first_[static_cast<size_t>(row.purpose)].row[by_tier ? row.of : 0];
  if (first < 0) first = static_cast<int>(rows.size());
  rows.push_back(row);
  rows.back().first_extent = static_cast<int>(extents.size());
  return rows.back();
}

int64_t Table::ElementsOf(Purpose purpose, int of, bool trainable) const {
  const int row = Find(purpose, of, trainable);
  return row < 0 ? 0 : rows[row].elements;
}

std::span<const Extent> Table::ExtentsOf(int row) const {
  const Array& of = rows[row];
  return std::span(extents).subspan(static_cast<size_t>(of.first_extent),
                                    static_cast<size_t>(of.extents));
}

std::span<Extent> Table::ExtentsOf(int row) {
  const Array& of = rows[row];
  return std::span(extents).subspan(static_cast<size_t>(of.first_extent),
                                    static_cast<size_t>(of.extents));
}

const Extent& Table::ExtentOf(int row, int64_t element) const {
  const std::span<const Extent> of = ExtentsOf(row);
  const auto holds = [](int64_t at, const Extent& extent) { return at < extent.end; };
  return *std::upper_bound(of.begin(), of.end(), element, holds);
}

std::span<const Lifetime> Table::LifetimesOf(int row) const {
  const Array& of = rows[row];
  return std::span(lifetimes).subspan(static_cast<size_t>(of.first_lifetime),
                                      static_cast<size_t>(of.lifetimes));
}

Place Table::PlaceOf(int row, int64_t element) const {
  if (row < 0 || rows[row].elements == 0) return {};
  const Array& of = rows[row];
  const Extent& extent = of.extents == 1 ? extents[of.first_extent] : ExtentOf(row, element);
  return extent.place.Plus((element - extent.begin) * of.encoding.code_bytes());
}

Place Table::TurnOf(int row, int64_t turn) const {
  if (row < 0 || rows[row].elements == 0) return {};
  const Array& of = rows[row];
  return ExtentsOf(row).front().place.Plus(turn % of.turns * of.turn_bytes);
}

Place Table::OwnSlice(int row, int64_t element) const {
  const Array& of = rows[row];
  if (of.spread != Spread::kWhole) return PlaceOf(row, element);
  Place place = PlaceOf(row).Plus(element * of.encoding.code_bytes());
  place.per_slice = of.elements / slices * of.encoding.code_bytes();
  return place;
}

std::vector<Extent> Table::OwnExtents(int row) const {
  const Array& of = rows[row];
  const std::span<const Extent> all = ExtentsOf(row);
  if (of.spread != Spread::kWhole) return {all.begin(), all.end()};
  if (of.elements == 0) return {};
  return {{.begin = 0, .end = of.elements / slices, .place = OwnSlice(row)}};
}

Place Table::UpdatedPlace(int row, int64_t element) const {
  return updates_whole ? PlaceOf(row, element) : OwnSlice(row, element);
}

Place Table::PlaceOfSubGroup(int row, int sub_group) const {
  if (row < 0 || rows[row].elements == 0) return {};
  const SubGroup& group = sub_groups[sub_group];
  const Array& of = rows[row];
  if (!FactsOf(of.purpose).updated) return UpdatedPlace(row, group.begin);
  const int index = of.first_extent + sub_group - FirstSubGroupOf(group.unit);  // one for each
  return extents[index].place;
}

std::vector<int> Table::UpdatedRows(int unit) const {
  std::vector<int> updated = {Find(Purpose::kMaster, unit)};
  for (int state = 0; state < states; ++state)
    updated.push_back(Find(Purpose::kState, unit, /*trainable=*/true, state));
  return updated;
}

std::span<const SubGroup> Table::SubGroupsOf(int unit) const {
  const auto first = static_cast<size_t>(FirstSubGroupOf(unit)),
             end = static_cast<size_t>(FirstSubGroupOf(unit + 1));
  return std::span(sub_groups).subspan(first, end - first);
}

int GatheredFrom(const Table& table, int unit, bool trainable) {
  const int parameter = table.Find(Purpose::kParameter, unit, trainable);
  return table.TierOf(parameter) == Tier::kDevice ? parameter : WholeRow(table, unit, trainable);
}

void AddGather(const Table& table, int unit, std::vector<Operand>& operands) {
  for (const bool trainable : {true, false}) {
    const int from = GatheredFrom(table, unit, trainable), to = WholeRow(table, unit, trainable);
    const Array& whole = table[to];
    if (whole.elements == 0) continue;
    operands.push_back({.place = table.OwnSlice(from),
                        .encoding = whole.encoding,
                        .access = Access::kRead,
                        .count = whole.elements / table.slices});
    operands.push_back({.place = table.PlaceOf(to),
                        .encoding = whole.encoding,
                        .access = Access::kWrite,
                        .count = whole.elements});
  }
}

int64_t SwapBytes(const Table& table, int unit) {
  int64_t bytes = 0;
  for (const bool trainable : {true, false}) {
    const int row = table.Find(Purpose::kParameter, unit, trainable);
    for (const Extent& extent : table.ExtentsOf(row)) {
      if (extent.place.tier == Tier::kNvme)
        bytes += SwapAligned(table[row].encoding.bytes(extent.count()));
    }
  }
  return bytes;
}

namespace {

// Bytes [first, second) of the gather pool; the same if the unit is kept whole.
std::pair<int64_t, int64_t> GatherMemory(const Table& table, int unit) {
  std::pair<int64_t, int64_t> memory = {INT64_MAX, 0};
  for (const bool trainable : {true, false}) {
    const int row = WholeRow(table, unit, trainable);
    if (table[row].purpose != Purpose::kGathered || table[row].elements == 0) continue;
    const int64_t begin = table.PlaceOf(row).offset;
    memory = {std::min(memory.first, begin), std::max(memory.second, begin + table[row].bytes())};
  }
  return memory;
}

}  // namespace

bool GathersConflict(const Table& table, int unit, int other) {
  const auto a = GatherMemory(table, unit), b = GatherMemory(table, other);
  return unit != other && a.first < b.second && b.first < a.second;
}

Tier ParameterTierOf(const Table& table, const SubGroup& group) {
  const int row = table.Find(Purpose::kParameter, group.unit);
  return table[row].spread == Spread::kWhole ? Tier::kDevice
                                             : table.ExtentOf(row, group.begin).place.tier;
}

}  // namespace ebb::sharding
