// Where the arrays of a table lie.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "ebb/sharding/passes/pool.h"
#include "ebb/sharding/passes/rows.h"

namespace ebb::sharding {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
// One kernel streams through masters and states together. These arrays must not start at the same
// offset of a huge page, or their lines compete for the same cache sets and memory banks. A multiple
// of kPoolAlignment.
constexpr int64_t kSkew = 69'888;

// Transfers with files begin and end at multiples of kSwapAlignment.
int64_t Aligned(Tier tier, StateClass state, int64_t bytes) {
  const bool swaps =
      tier == Tier::kNvme ||
      (tier == Tier::kCpu && (state == StateClass::kStaging || state == StateClass::kActivation));
  return swaps ? SwapAligned(bytes) : PoolAligned(bytes);
}

bool IsUpdated(const Array& row) {
  return FactsOf(row.purpose).updated;
}

class Allocation {
 public:
  explicit Allocation(Table& table) : table_(table) {
    std::array<int64_t, kTiers> elements = {};
    for (const SubGroup& group : table.sub_groups)
      elements[static_cast<size_t>(group.tier)] += group.count();
    for (size_t tier = 0; tier < elements.size(); ++tier)
      if (elements[tier] * SizeOf(DType::kFloat32) >= kHugePage) skew_[tier] = kSkew;
  }

  void Run() {
    for (const StateClass state :
         {StateClass::kGather, StateClass::kGradient, StateClass::kActivation})
      Share(state);
    SwapStates();
    for (size_t row = 0; row < table_.rows.size(); ++row) {
      if (!table_.rows[row].behind && !table_.rows[row].shares) PlaceBlock(static_cast<int>(row));
    }
    if (const int walk = table_.Find(Purpose::kWalkOutputs); walk >= 0) {
      // It has all of its pool.
      Array& row = table_.rows[walk];
      const int64_t pool = table_.bytes.Of(Tier::kDevice, StateClass::kActivation);
      row.turns = static_cast<int>(pool / (2 * row.turn_bytes) * 2);
    }
    table_.lifetimes = {};
    for (int row = 0; row < std::ssize(table_.rows); ++row) {
      table_.rows[row].first_lifetime = table_.rows[row].lifetimes = 0;
      for (Extent& extent : table_.ExtentsOf(row)) extent.place.row = row;
    }
  }

 private:
  StateClass ClassOf(int row) const { return FactsOf(table_[row].purpose).counted; }
  // Calls each(row) for a row and those behind it.
  template <class Each>
  void ForBlock(int row, const Each& each) const {
    const int rows = static_cast<int>(table_.rows.size());
    do each(row);
    while (++row < rows && table_[row].behind);
  }
  int64_t BytesOfBlock(int first, Tier tier) const {
    const Array& row = table_[first];
    if (row.turn_bytes > 0) return row.turns * row.turn_bytes;
    int64_t bytes = 0;
    int rows = 0;
    ForBlock(first, [&](int each) {
      bytes += Aligned(tier, ClassOf(each), table_[each].bytes());
      ++rows;
    });
    return rows > 1 ? bytes : row.bytes();
  }
  // The rows of a block, one behind the other from an offset on.
  void PutBlock(int first, int64_t offset) {
    ForBlock(first, [&](int row) {
      for (Extent& extent : table_.ExtentsOf(row)) {
        extent.place.pool = ClassOf(row);
        extent.place.offset = offset;
        offset += Aligned(extent.place.tier, ClassOf(row), table_[row].bytes());
      }
    });
  }

  void Share(StateClass state) {
    std::vector<PoolBlock> blocks;
    std::vector<int> rows;
    for (int row = 0; row < static_cast<int>(table_.rows.size()); ++row) {
      if (!table_[row].shares || ClassOf(row) != state) continue;
      const std::span<const Lifetime> lives = table_.LifetimesOf(row);
      blocks.push_back(
          {.bytes = BytesOfBlock(row, Tier::kDevice), .lifetimes = {lives.begin(), lives.end()}});
      rows.push_back(row);
    }
    table_.bytes.Of(Tier::kDevice, state) = Pack(blocks);
    for (size_t i = 0; i < rows.size(); ++i) PutBlock(rows[i], blocks[i].offset);
  }

  void PlaceBlock(int row) {
    const std::span<Extent> extents = table_.ExtentsOf(row);
    if (extents.empty()) return;
    if (extents.size() == 1 && !IsUpdated(table_[row])) {
      const Tier tier = extents.front().place.tier;
      PutBlock(row, Take(tier, ClassOf(row), BytesOfBlock(row, tier)));
      return;
    }
    for (Extent& extent : extents) {
      Place& place = extent.place;
      if (IsUpdated(table_[row])) {
        if (place.tier == Tier::kNvme) continue;
        Skew(row, place.tier);
      }
      place.pool = ClassOf(row);
      place.offset = Take(place.tier, place.pool, table_[row].encoding.bytes(extent.count()));
    }
  }

  // Master and states of a sub-group lie end to end in their file: they are read and written
  // together.
  void SwapStates() {
    for (int unit = 0; unit < table_.units; ++unit) {
      std::vector<int> rows = table_.UpdatedRows(unit);
      std::erase_if(
          rows, [this](int row) { return !IsUpdated(table_[row]) || table_[row].elements == 0; });
      const std::span<const SubGroup> groups = table_.SubGroupsOf(unit);
      for (size_t i = 0; i < groups.size(); ++i) {
        if (groups[i].tier != Tier::kNvme) continue;
        for (const int row : rows) {
          Place& place = table_.ExtentsOf(row)[i].place;
          place.pool = ClassOf(row);
          place.offset =
              Take(Tier::kNvme, place.pool, table_[row].encoding.bytes(groups[i].count()));
        }
      }
    }
  }

  // Before the first array on a tier: of the masters one skew, of state k two and k more.
  void Skew(int row, Tier tier) {
    const size_t t = static_cast<size_t>(tier);
    const bool is_state = ClassOf(row) == StateClass::kOptimizer;
    int& skews = skews_[is_state ? 1 : 0][t];
    for (const int wanted = is_state ? 2 + table_[row].state : 1; skews < wanted; ++skews)
      table_.bytes.Of(tier, ClassOf(row)) += skew_[t];
  }

  // The offset of as many bytes more in a pool or file.
  int64_t Take(Tier tier, StateClass state, int64_t bytes) {
    const int64_t aligned = Aligned(tier, state, bytes);
    int64_t& pool = table_.bytes.Of(tier, state);
    const int64_t offset = std::exchange(pool, pool + aligned);
    if (tier != Tier::kNvme || state == StateClass::kParameter) return offset;
    return std::exchange(state_file_, state_file_ + aligned);
  }

  Table& table_;
  int64_t state_file_ = 0;  // its end so far: of all classes but parameters
  std::array<int64_t, kTiers> skew_ = {};
  std::array<int, kTiers> skews_[2] = {};  // so far, of masters and of states
};

}  // namespace

void Allocate(Table& table) {
  Allocation(table).Run();
}

}  // namespace ebb::sharding
