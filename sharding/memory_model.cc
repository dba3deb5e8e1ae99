#include "ebb/sharding/memory_model.h"

#include <algorithm>
#include <cstddef>

#include "ebb/sharding/state_pieces.h"

namespace ebb::sharding {

int64_t BufferBytes(int64_t pool_bytes) {
  constexpr int64_t kPage = 4096;
  return (pool_bytes + kPage - 1) / kPage * kPage;
}

std::vector<MemoryRow> PredictMemory(const PoolBytes& pools) {
  std::vector<MemoryRow> rows;
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    for (int c = 0; c < kStateClasses; ++c) {
      const StateClass state = static_cast<StateClass>(c);
      if (pools.Of(tier, state) == 0) continue;
      rows.push_back(
          {.state = state,
           .tier = tier,
           .predicted_bytes = static_cast<uint64_t>(BufferBytes(pools.Of(tier, state)))});
    }
  }
  return rows;
}

int64_t StateStagingBytes(const PoolBytes& pools, bool has_gpu) {
  const PoolBytes::Classes& on_nvme = pools.On(Tier::kNvme);
  const bool swaps =
      std::any_of(on_nvme.begin(), on_nvme.end(), [](int64_t bytes) { return bytes > 0; });
  return has_gpu || swaps ? 2 * kStateStagingBytes : 0;
}

int64_t SaveBytes(const PoolBytes& pools, bool has_gpu) {
  return kSaveBufferBytes + 2 * StateStagingBytes(pools, has_gpu);
}

namespace {

constexpr int kNowhere = -1;

// Bytes between two places where an operand begins or ends.
struct Cell {
  int begin = kNowhere, last = kNowhere;  // operations: of the value that is there now
  bool from_before = false;               // a step reads it before it writes it
};

class PoolCells {
 public:
  void Cut(const Operand& operand) {
    cuts_.push_back(operand.place.offset);
    cuts_.push_back(operand.place.offset + operand.bytes());
  }
  void Number() {
    std::sort(cuts_.begin(), cuts_.end());
    cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
    cells_.resize(cuts_.size());
  }

  // Calls add(begin, last, bytes) for each value with a last use that is known now.
  template <class Add>
  void Touch(const Operand& operand, int op, const Add& add) {
    const auto first = std::lower_bound(cuts_.begin(), cuts_.end(), operand.place.offset);
    const int64_t end = operand.place.offset + operand.bytes();
    for (auto at = static_cast<size_t>(first - cuts_.begin()); at < cuts_.size() && cuts_[at] < end;
         ++at) {
      Cell& cell = cells_[at];
      const bool replaces = !Reads(operand.access) && cell.last != op;
      if (cell.begin == kNowhere && !replaces) {
        cell.from_before = true;
        cell.begin = 0;
      } else if (replaces) {
        if (cell.begin != kNowhere) add(cell.begin, cell.last, Bytes(at));
        cell.begin = op;
      }
      cell.last = op;
    }
  }
  template <class Add>
  void End(int ops, const Add& add) {
    for (size_t at = 0; at + 1 < cells_.size(); ++at) {
      const Cell& cell = cells_[at];
      if (cell.begin == kNowhere) continue;
      add(cell.begin, cell.from_before ? ops - 1 : cell.last, Bytes(at));
    }
  }

 private:
  int64_t Bytes(size_t at) const { return cuts_[at + 1] - cuts_[at]; }
  std::vector<int64_t> cuts_;
  std::vector<Cell> cells_;
};

}  // namespace

std::vector<ClassBytes> AliveBytes(const OpList& list, Tier tier) {
  std::array<PoolCells, kStateClasses> pools;
  const auto counts = [tier](const Operand& operand) {
    return operand.access != Access::kNone && operand.place.tier == tier &&
           static_cast<int>(operand.place.pool) < kStateClasses;
  };
  for (const Op& op : list.ops) {
    for (const Operand& operand : op.operands) {
      if (counts(operand)) pools[static_cast<size_t>(operand.place.pool)].Cut(operand);
    }
  }
  for (PoolCells& pool : pools) pool.Number();

  // First the bytes that come at an operation or go after a last use; then their running sum.
  const int count = static_cast<int>(list.ops.size());
  std::vector<ClassBytes> alive(static_cast<size_t>(count) + 1);
  const auto adder = [&](size_t of) {
    return [&alive, of](int begin, int last, int64_t bytes) {
      alive[begin][of] += bytes;
      alive[static_cast<size_t>(last) + 1][of] -= bytes;
    };
  };
  for (int i = 0; i < count; ++i) {
    for (const Operand& operand : list.ops[i].operands) {
      if (!counts(operand)) continue;
      const auto of = static_cast<size_t>(operand.place.pool);
      pools[of].Touch(operand, i, adder(of));
    }
  }
  for (size_t of = 0; of < pools.size(); ++of) pools[of].End(count, adder(of));
  for (size_t i = 1; i < alive.size(); ++i) {
    for (size_t of = 0; of < kStateClasses; ++of) alive[i][of] += alive[i - 1][of];
  }
  alive.pop_back();
  return alive;
}

}  // namespace ebb::sharding
