// The table of a rank's arrays, and the pools that they lie in. Every rank has the same, because
// shards are equal slices.
#pragma once

#include <array>
#include <cassert>
#include <cstdint>
#include <ranges>
#include <span>
#include <vector>

#include "ebb/sharding/array.h"
#include "ebb/sharding/place.h"
#include "ebb/sharding/placement.h"
#include "ebb/sharding/state.h"

namespace ebb::sharding {

struct Operand;

// Bytes of a rank's pools, by tier and class. On NVMe a class has its part of a swap file.
class PoolBytes {
 public:
  using Classes = std::array<int64_t, kStateClasses>;

  Classes& On(Tier tier) { return bytes_[static_cast<size_t>(tier)]; }
  const Classes& On(Tier tier) const { return bytes_[static_cast<size_t>(tier)]; }
  int64_t& Of(Tier tier, StateClass state) { return On(tier)[static_cast<size_t>(state)]; }
  int64_t Of(Tier tier, StateClass state) const { return On(tier)[static_cast<size_t>(state)]; }
  // The states file, which holds all classes but parameters.
  int64_t state_file() const;
  friend bool operator==(const PoolBytes&, const PoolBytes&) = default;

 private:
  std::array<Classes, kTiers> bytes_ = {};
};

struct Table {
  int units = 0, visits = 0, states = 0;  // states: of the optimizer
  int slices = 1;                         // ranks that each unit is cut over
  int secondary_slices = 0;    // ranks that hold a secondary copy together; 0: there is none
  bool updates_whole = false;  // stage 0: every rank updates all elements of a unit
  // The earlier of two equal blocks gets the lower address.
  std::vector<Array> rows;
  std::vector<Extent> extents;
  std::vector<Lifetime> lifetimes;    // until the rows have places
  std::vector<SubGroup> sub_groups;   // by unit, in order
  std::vector<int> first_sub_groups;  // by unit, and behind the last one
  PoolBytes bytes;

  // Adds a row behind the others. Rows of one purpose come in the order of their keys (Find).
  Array& Add(const Array& row);
  void AddExtent(const Extent& extent) {  // of the newest row
    extents.push_back(extent);
    ++rows.back().extents;
  }

  // The row, or the one that it is another name for; -1: the table has none. `of`: unit, visit or
  // GradientKey; kTier: whether it is the one in host memory.
  int Find(Purpose purpose, int of = 0, bool trainable = true, int state = 0) const {
    const ArrayOf key = FactsOf(purpose).of;
    const int first = first_[static_cast<size_t>(purpose)].row[key == ArrayOf::kTier ? of : 0];
    if (first < 0) return -1;
    int row = first + state;
    if (key == ArrayOf::kUnit) row = first + state * units + of;
    if (key == ArrayOf::kSection) row = first + 2 * of + (trainable ? 0 : 1);
    if (key == ArrayOf::kVisit || key == ArrayOf::kGradientKey) row = first + of;
    assert(rows[row].purpose == purpose);
    const int same_as = rows[row].same_as;
    return same_as < 0 ? row : same_as;
  }
  int OnTier(Purpose purpose, bool on_host, int state = 0) const {
    return Find(purpose, on_host ? 1 : 0, /*trainable=*/true, state);
  }
  // Its elements; 0: there is no such array.
  int64_t ElementsOf(Purpose purpose, int of = 0, bool trainable = true) const;
  bool Has(Purpose purpose, int of = 0) const { return ElementsOf(purpose, of) > 0; }
  const Array& operator[](int row) const { return rows[row]; }

  std::span<const Extent> ExtentsOf(int row) const;
  std::span<Extent> ExtentsOf(int row);
  const Extent& ExtentOf(int row, int64_t element) const;
  std::span<const Lifetime> LifetimesOf(int row) const;

  // The place of an element of this rank's part of an array, or of nothing (-1).
  Place PlaceOf(int row, int64_t element = 0) const;
  // A turn of a ring, or of nothing.
  Place TurnOf(int row, int64_t turn) const;
  // This rank's slice: of an array that it holds whole its own part, else all of it.
  Place OwnSlice(int row, int64_t element = 0) const;
  std::vector<Extent> OwnExtents(int row) const;
  // An element of the part that this rank updates: its slice, or at stage 0 the whole.
  Place UpdatedPlace(int row, int64_t element) const;
  // The part of a sub-group, from its first element on.
  Place PlaceOfSubGroup(int row, int sub_group) const;
  Tier TierOf(int row) const { return PlaceOf(row).tier; }  // of the first element

  std::span<const SubGroup> SubGroupsOf(int unit) const;
  // The unit's master and states, in this order. A master without elements is among them.
  std::vector<int> UpdatedRows(int unit) const;
  int FirstSubGroupOf(int unit) const { return first_sub_groups[unit]; }
  // The unit's numbers in `sub_groups`.
  auto SubGroupNumbersOf(int unit) const {
    return std::views::iota(FirstSubGroupOf(unit), FirstSubGroupOf(unit + 1));
  }

  friend bool operator==(const Table& a, const Table& b) {
    return a.rows == b.rows && a.extents == b.extents && a.sub_groups == b.sub_groups &&
           a.first_sub_groups == b.first_sub_groups && a.bytes == b.bytes;
  }

 private:
  // By purpose, its first row on the device and in host memory; -1: there is none.
  struct First {
    std::array<int, 2> row = {-1, -1};
  };
  std::array<First, kPurposes> first_ = {};
};

// The engine keeps boundary activations. An evaluation holds so many micro-batches of them in a walk.
inline bool HasBoundaries(const Table& table) {
  return table.Find(Purpose::kWalkOutputs) >= 0;
}
inline int MicroBatchesOfWalk(const Table& table) {
  return table[table.Find(Purpose::kWalkOutputs)].turns / 2;
}

// Gives out the turns of a ring, one after the other.
class TurnCursor {
 public:
  TurnCursor(const Table& table, Purpose ring) : table_(table), row_(table.Find(ring)) {}
  Place Next() { return table_.TurnOf(row_, next_++); }
  // Starts from the first turn, as every round does that repeats the round before.
  void Restart() { next_ = 0; }

 private:
  const Table& table_;
  const int row_;
  int64_t next_ = 0;
};

// Where a unit's section is whole on the device while it is used.
inline int WholeRow(const Table& table, int unit, bool trainable) {
  return table.Find(Purpose::kGathered, unit, trainable);
}
// The row that a gather of the section reads: parameters on the device, or whole memory into which
// slices from below are uploaded.
int GatheredFrom(const Table& table, int unit, bool trainable);
// Operands of an all-gather of the unit from all its slices.
void AddGather(const Table& table, int unit, std::vector<Operand>& operands);
// Bytes of the swap file that a gather of the unit reads.
int64_t SwapBytes(const Table& table, int unit);
// Which units share memory of the gather pool. A unit's whole parameters have one address, and other
// units lie there at other times.
//
//   prefetch_depth 0   | 0 |        prefetch_depth 1   | 0 | 1 |
//                      | 1 |                           | 2 | 3 |
//
// Here 0 conflicts with 1 and with 2. A unit does not conflict with itself.
bool GathersConflict(const Table& table, int unit, int other);
// The tier of the parameters that a sub-group updates.
Tier ParameterTierOf(const Table& table, const SubGroup& group);

}  // namespace ebb::sharding
