#include "ebb/sharding/waits.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>

namespace ebb::sharding {
namespace {

void SortUnique(std::vector<int64_t>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

// The interval between two cuts that holds `at`.
size_t Holding(const std::vector<int64_t>& cuts, int64_t at) {
  const auto next = std::upper_bound(cuts.begin(), cuts.end(), at);
  return next == cuts.begin() ? 0 : static_cast<size_t>(next - cuts.begin()) - 1;
}

// Past the last interval that holds a byte before `end`.
size_t PastHolding(const std::vector<int64_t>& cuts, int64_t end) {
  return static_cast<size_t>(std::lower_bound(cuts.begin(), cuts.end(), end) - cuts.begin());
}

bool IsControl(const Operand& operand) {
  return operand.place.pool == StateClass::kControl;
}

}  // namespace

// A rank has two files: one of parameters, one of everything else.
std::pair<int, int> Cells::KeyOf(const Place& place) {
  const bool of_states = place.tier == Tier::kNvme && place.pool != StateClass::kParameter;
  return {static_cast<int>(place.tier),
          static_cast<int>(of_states ? StateClass::kMaster : place.pool)};
}

// Stands for all slices.
int64_t Cells::EndOf(const Operand& operand) const {
  const Place& place = operand.place;
  const int slices = place.of_secondary ? secondary_slices_ : slices_;
  return place.offset + (slices - 1) * place.per_slice + operand.bytes();
}

Cells::Cells(std::span<const OpList* const> lists, int units, int slices, int secondary_slices)
    : slices_(slices), secondary_slices_(secondary_slices), control_(units) {
  std::map<std::pair<int, int>, std::vector<const Operand*>> touched;
  for (const OpList* list : lists) {
    for (const Op& op : list->ops) {
      for (const Operand& operand : op.operands) {
        if (operand.access != Access::kNone && !IsControl(operand))
          touched[KeyOf(operand.place)].push_back(&operand);
      }
    }
  }
  // Other lists may touch pools that these do not touch.
  for (int tier = 0; tier < kTiers; ++tier) {
    for (int pool = 0; pool < kStateClasses; ++pool)
      pools_[KeyOf({.tier = static_cast<Tier>(tier), .pool = static_cast<StateClass>(pool)})];
  }
  // Sections: operands of one stride that begin within one slice of each other.
  for (auto& [key, operands] : touched) {
    const auto sliced_end =
        std::partition(operands.begin(), operands.end(), [](const Operand* operand) {
          return operand->place.per_slice > 0 && !operand->place.of_secondary;
        });
    const std::span sliced(operands.begin(), sliced_end);
    std::sort(sliced.begin(), sliced.end(), [](const Operand* a, const Operand* b) {
      return std::pair(a->place.per_slice, a->place.offset) <
             std::pair(b->place.per_slice, b->place.offset);
    });
    std::vector<Slices> found;
    for (const Operand* operand : sliced) {
      const Place& place = operand->place;
      if (found.empty() || found.back().stride != place.per_slice ||
          place.offset >= found.back().begin + place.per_slice)
        found.push_back({.begin = place.offset, .end = 0, .stride = place.per_slice, .cuts = {}});
      Slices& section = found.back();
      section.end = std::max(section.end, EndOf(*operand));
      section.cuts.push_back(place.offset - section.begin);
      section.cuts.push_back(place.offset - section.begin + operand->bytes());
    }
    // All slices of sections that share memory conflict.
    Pool& pool = pools_[key];
    for (Slices& section : found) {
      const bool alone = std::none_of(found.begin(), found.end(), [&](const Slices& other) {
        return &other != &section && other.begin < section.end && section.begin < other.end;
      });
      if (alone) {
        SortUnique(section.cuts);
        pool.sliced.push_back(section);
      }
    }
    // Operands of a section cut its slices, not the pool.
    const auto cuts_slices = [&](const Place& place) {
      return std::any_of(pool.sliced.begin(), pool.sliced.end(), [&](const Slices& section) {
        return section.stride == place.per_slice && place.offset >= section.begin &&
               place.offset < section.begin + section.stride;
      });
    };
    for (size_t i = 0; i < operands.size(); ++i) {
      if (i < sliced.size() && cuts_slices(operands[i]->place)) continue;
      pool.cuts.push_back(operands[i]->place.offset);
      pool.cuts.push_back(EndOf(*operands[i]));
    }
    for (const Slices& section : pool.sliced) {
      pool.cuts.push_back(section.begin);
      pool.cuts.push_back(section.end);
    }
  }
  count_ = static_cast<int>(control_.count());
  for (auto& [key, pool] : pools_) {
    // Steps of other rounds use other slots, so bytes that this list does not touch still
    // count.
    pool.cuts.push_back(0);
    pool.cuts.push_back(std::numeric_limits<int64_t>::max());
    SortUnique(pool.cuts);
    pool.slices.assign(pool.cuts.size(), -1);
    for (size_t s = 0; s < pool.sliced.size(); ++s) {
      const Slices& section = pool.sliced[s];
      for (size_t i = Holding(pool.cuts, section.begin); i < PastHolding(pool.cuts, section.end);
           ++i)
        pool.slices[i] = static_cast<int>(s);
    }
    for (size_t i = 0; i < pool.cuts.size(); ++i) {
      pool.first_cell.push_back(count_);
      if (i + 1 == pool.cuts.size()) break;
      const int s = pool.slices[i];
      count_ += s < 0 ? 1 : static_cast<int>(pool.sliced[s].cuts.size()) - 1;
    }
  }
}

void Cells::Find(const Operand& operand, std::vector<CellRange>& ranges) const {
  if (operand.access == Access::kNone) return;
  const Place& place = operand.place;
  if (IsControl(operand)) {
    ranges.emplace_back(static_cast<int>(place.offset),
                        static_cast<int>(place.offset + operand.count));
    return;
  }
  const Pool& pool = pools_.at(KeyOf(place));
  const size_t first = Holding(pool.cuts, place.offset),
               last = std::min(PastHolding(pool.cuts, EndOf(operand)), pool.cuts.size() - 1);
  if (first >= last) return;
  const int s = place.of_secondary || place.per_slice == 0 ? -1 : pool.slices[first];
  if (s >= 0) {
    const Slices& section = pool.sliced[s];
    const int64_t at = place.offset - section.begin;
    // Bytes behind the last cut count as all slices, like operands without slices.
    if (section.stride == place.per_slice && at >= 0 && at < section.stride &&
        at + operand.bytes() <= section.cuts.back()) {
      const int begin = static_cast<int>(Holding(section.cuts, at)),
                end = static_cast<int>(PastHolding(section.cuts, at + operand.bytes()));
      for (size_t i = first; i < last && pool.slices[i] == s; ++i)
        ranges.emplace_back(pool.first_cell[i] + begin, pool.first_cell[i] + end);
      return;
    }
  }
  ranges.emplace_back(pool.first_cell[first], pool.first_cell[last]);
}

namespace {

class Derivation {
 public:
  Derivation(const Cells& cells, OpList& list)
      : cells_(cells),
        list_(list),
        of_cell_(static_cast<size_t>(cells.count())),
        over_(list.ops.size()) {
    list.waits.assign(list.ops.size(), {});
    list.wait_memory = memory_;
  }

  void Run(int begin, int end);  // operations; none before `begin` counts

 private:
  using Clock = std::array<int, kLines>;  // by line: the last operation that is over; -1: none
  static Clock None() {
    Clock none;
    none.fill(-1);
    return none;
  }
  struct CellState {
    int writer = -1;
    Clock readers = None();  // by line, since the write
    uint32_t entered = 0;    // lines on which a reader has started that waits for earlier lists
    bool written_later = false;
    uint32_t read_later = 0;  // lines
  };
  struct CellTouch {
    int cell = 0;
    Access access{};
    bool by_parity = false;
  };

  void FindTouches(const Op& op);
  std::span<const CellTouch> TouchesOf(int index) const {
    const auto at = static_cast<size_t>(index - first_);
    return std::span(touches_).subspan(first_touch_[at], first_touch_[at + 1] - first_touch_[at]);
  }
  void Await(int index);
  void Leave(int index);

  const Cells& cells_;
  OpList& list_;
  const std::shared_ptr<WaitMemory> memory_ = std::make_shared<WaitMemory>();
  std::vector<CellState> of_cell_;
  std::vector<Clock> over_;  // by operation: the operations that are over when it is
  std::array<Clock, kLines> clocks_;
  std::vector<CellTouch> touches_;   // of all operations, one behind the other
  std::vector<size_t> first_touch_;  // by operation from the first on
  int first_ = 0;
  std::vector<CellRange> ranges_;
  std::vector<int> candidates_, waits_;
  std::vector<CellUse> uses_;
};

// Cells of the next operation, each once. A carried operation uses those of the other parity.
void Derivation::FindTouches(const Op& op) {
  const auto first = static_cast<std::ptrdiff_t>(touches_.size());
  for (const Operand& operand : op.operands) {
    ranges_.clear();
    cells_.Find(operand, ranges_);
    const bool control = operand.place.pool == StateClass::kControl;
    for (const auto& [begin, end] : ranges_) {
      for (int cell = begin; cell < end; ++cell) {
        const bool by_parity = control && cells_.control().by_parity(cell);
        touches_.push_back({.cell = by_parity && op.carried() ? cell ^ 1 : cell,
                            .access = operand.access,
                            .by_parity = by_parity});
      }
    }
  }
  if (op.operands.size() > 1) {
    std::sort(touches_.begin() + first, touches_.end(),
              [](const CellTouch& a, const CellTouch& b) { return a.cell < b.cell; });
    auto kept = touches_.begin() + first;
    for (auto touch = kept; touch != touches_.end(); ++touch) {
      if (kept != touches_.begin() + first && (kept - 1)->cell == touch->cell) {
        if ((kept - 1)->access != touch->access) (kept - 1)->access = Access::kReadWrite;
      } else {
        *kept++ = *touch;
      }
    }
    touches_.erase(kept, touches_.end());
  }
  first_touch_.push_back(touches_.size());
}

void Derivation::Await(int index) {
  const Op& op = list_.ops[index];
  Clock& clock = clocks_[op.starts];
  FindTouches(op);
  const std::span<const CellTouch> touches = TouchesOf(index);
  candidates_.clear();
  for (const CellTouch& touch : touches) {
    const CellState& cell = of_cell_[touch.cell];
    if (cell.writer >= 0) candidates_.push_back(cell.writer);
    if (!Writes(touch.access)) continue;
    for (int reader : cell.readers) {
      if (reader >= 0) candidates_.push_back(reader);
    }
  }
  std::sort(candidates_.begin(), candidates_.end(), std::greater<>());
  waits_.clear();
  for (int candidate : candidates_) {
    const Op& other = list_.ops[candidate];
    if (clock[other.ends] >= candidate) continue;
    waits_.push_back(candidate);
    list_.waits[candidate].awaited = true;
    const Clock& over = over_[candidate];
    for (size_t l = 0; l < clock.size(); ++l) clock[l] = std::max(clock[l], over[l]);
  }
  list_.waits[index].on = memory_->on.Keep(waits_);
  // Uses before the list: readers on the same line have waited for its last write already.
  uses_.clear();
  const uint32_t line = 1u << op.starts;
  for (const CellTouch& touch : touches) {
    CellState& cell = of_cell_[touch.cell];
    if (cell.writer >= 0) continue;
    const bool writes = Writes(touch.access);
    if (!writes && (cell.entered & line) != 0) continue;
    cell.entered |= line;
    uses_.push_back({.cell = touch.cell, .writes = writes, .by_parity = touch.by_parity});
  }
  list_.waits[index].enters = memory_->uses.Keep(uses_);
  for (const CellTouch& touch : touches) {
    CellState& cell = of_cell_[touch.cell];
    if (Writes(touch.access)) {
      cell.writer = index;
      cell.readers = None();
    } else {
      cell.readers[op.ends] = index;
    }
  }
  Clock& ends = clocks_[op.ends];
  for (size_t l = 0; l < ends.size(); ++l) ends[l] = std::max(ends[l], clock[l]);
  ends[op.ends] = index;
  over_[index] = ends;
}

void Derivation::Leave(int index) {
  const Op& op = list_.ops[index];
  uses_.clear();
  const uint32_t line = 1u << op.ends;
  for (const CellTouch& touch : TouchesOf(index)) {
    CellState& cell = of_cell_[touch.cell];
    if (cell.written_later) continue;
    const bool writes = Writes(touch.access);
    if (writes) {
      cell.written_later = true;
    } else {
      if ((cell.read_later & line) != 0) continue;
      cell.read_later |= line;
    }
    uses_.push_back({.cell = touch.cell, .writes = writes, .by_parity = touch.by_parity});
  }
  list_.waits[index].leaves = memory_->uses.Keep(uses_);
  list_.waits[index].awaited |= !uses_.empty();
}

void Derivation::Run(int begin, int end) {
  std::fill(of_cell_.begin(), of_cell_.end(), CellState());
  clocks_.fill(None());
  touches_.clear();
  first_touch_.assign(1, 0);
  first_ = begin;
  for (int index = begin; index < end; ++index) Await(index);
  for (int index = end - 1; index >= begin; --index) Leave(index);
}

}  // namespace

void DeriveWaits(const Cells& cells, OpList& list) {
  Derivation derivation(cells, list);
  int begin = 0;
  for (int next : list.round_begins) {
    derivation.Run(begin, next);
    begin = next;
  }
  derivation.Run(begin, static_cast<int>(list.ops.size()));
}

// Backwards from the end: which cells are read later, and have not been written in between.
std::vector<int> FindToBringAgain(const Cells& cells, const OpList& list, int next) {
  std::vector<uint8_t> is_read(static_cast<size_t>(cells.count()), 0);
  std::vector<CellRange> ranges;
  std::vector<int> again;
  for (int index = static_cast<int>(list.ops.size()); index-- > 0;) {
    const Op& op = list.ops[index];
    const auto for_cells = [&](bool (*touches)(Access), auto visit) {
      ranges.clear();
      for (const Operand& operand : op.operands)
        if (touches(operand.access)) cells.Find(operand, ranges);
      for (const auto& [begin, end] : ranges)
        std::for_each(is_read.begin() + begin, is_read.begin() + end, visit);
    };
    bool runs = index >= next;
    // Secondary shards stay: an evaluation does not touch them.
    const bool brings = !runs && FactsOf(op.role).brings_parameters;
    for_cells(Writes, [&](uint8_t& cell) {
      runs |= brings && cell != 0;
      cell = 0;
    });
    if (!runs) continue;
    for_cells(Reads, [](uint8_t& cell) { cell = 1; });
    if (index < next) again.push_back(index);
  }
  std::reverse(again.begin(), again.end());
  return again;
}

std::vector<int> FindCarried(const OpList& list, int next) {
  std::vector<int> carried;
  for (int index = next; index < static_cast<int>(list.ops.size()); ++index)
    if (list.ops[index].carried()) carried.push_back(index);
  return carried;
}

bool HasCarriedFrom(const Plan& plan, size_t moment) {
  return std::any_of(plan.ops.begin() + plan.moments[moment].begin, plan.ops.end(),
                     [](const Op& of) { return of.carried(); });
}

}  // namespace ebb::sharding
