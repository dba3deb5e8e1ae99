#include "ebb/runtime/trace/ledger.h"

#include <atomic>
#include <cassert>
#include <utility>

namespace ebb {

// The counters are statistics: they order nothing else, so relaxed atomics suffice.
struct MemoryLedger::Cells {
  // A cache line each: queues of one rank charge different cells at once.
  struct alignas(64) Cell {
    std::atomic<int64_t> predicted{0}, current{0}, peak{0};
  };
  Cell cell[kStateClasses][kTiers];

  Cell& At(StateClass state, Tier tier) {
    return cell[static_cast<int>(state)][static_cast<int>(tier)];
  }
};

MemoryLedger::MemoryLedger() : cells_(std::make_unique<Cells>()) {}
MemoryLedger::~MemoryLedger() = default;

MemoryLedger::Charge::Charge(MemoryLedger& ledger, StateClass state, Tier tier, int64_t bytes)
    : ledger_(&ledger), state_(state), tier_(tier), bytes_(bytes) {
  assert(bytes >= 0);
  Cells::Cell& cell = ledger.cells_->At(state, tier);
  const int64_t current = cell.current.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t peak = cell.peak.load(std::memory_order_relaxed);
  while (peak < current &&
         !cell.peak.compare_exchange_weak(peak, current, std::memory_order_relaxed)) {
  }
}

MemoryLedger::Charge& MemoryLedger::Charge::operator=(Charge&& other) noexcept {
  if (this == &other) return *this;
  GiveBack();
  ledger_ = std::exchange(other.ledger_, nullptr);
  state_ = other.state_;
  tier_ = other.tier_;
  bytes_ = other.bytes_;
  return *this;
}

void MemoryLedger::Charge::GiveBack() {
  if (ledger_ == nullptr) return;
  [[maybe_unused]] const int64_t before =
      ledger_->cells_->At(state_, tier_).current.fetch_sub(bytes_, std::memory_order_relaxed);
  assert(before >= bytes_);
}

void MemoryLedger::Predict(StateClass state, Tier tier, int64_t bytes) {
  cells_->At(state, tier).predicted.fetch_add(bytes, std::memory_order_relaxed);
}

std::vector<MemoryRow> MemoryLedger::Rows() const {
  std::vector<MemoryRow> rows;
  for (int state = 0; state < kStateClasses; ++state) {
    for (int tier = 0; tier < kTiers; ++tier) {
      const Cells::Cell& cell = cells_->cell[state][tier];
      const MemoryRow row = {
          .state = static_cast<StateClass>(state),
          .tier = static_cast<Tier>(tier),
          .predicted_bytes = static_cast<uint64_t>(cell.predicted.load(std::memory_order_relaxed)),
          .current_bytes = static_cast<uint64_t>(cell.current.load(std::memory_order_relaxed)),
          .peak_bytes = static_cast<uint64_t>(cell.peak.load(std::memory_order_relaxed))};
      if (row.predicted_bytes > 0 || row.peak_bytes > 0) rows.push_back(row);
    }
  }
  return rows;
}

}  // namespace ebb
