#include "ebb/sharding/frontier.h"

#include <algorithm>
#include <utility>

namespace ebb::sharding {

Frontier::Frontier(int cells) : cells_(static_cast<size_t>(cells)) {}

int Frontier::AddEvent(Line line) {
  events_.push_back({.line = line});
  return static_cast<int>(events_.size()) - 1;
}

void Frontier::Follow(Line line, int event) {
  const Recorded& of = events_[static_cast<size_t>(event)];
  Clock& clock = clocks_[line];
  for (size_t l = 0; l < clock.size(); ++l) clock[l] = std::max(clock[l], of.clock[l]);
  clock[of.line] = std::max(clock[of.line], of.number);
}

// What ends elsewhere than it starts is over when its end is, and all ends before that one are; what starts next
// does not wait for it.
void Frontier::Issue(Line starts, Line ends, int event) {
  const int64_t number = ++issued_[ends];
  Clock& clock = clocks_[ends];
  if (starts != ends) {
    for (size_t l = 0; l < clock.size(); ++l) clock[l] = std::max(clock[l], clocks_[starts][l]);
  }
  clock[ends] = number;
  if (event < 0) return;
  Recorded& of = events_[static_cast<size_t>(event)];
  of.number = number;
  of.clock = clock;
}

void Frontier::Leave(std::span<const CellUse> uses, int parity, int event) {
  const Line line = events_[static_cast<size_t>(event)].line;
  for (const CellUse& use : uses) {
    Cell& cell = cells_[static_cast<size_t>(At(use, parity))];
    if (use.writes) {
      cell.writer = event;
      cell.readers = None();
    } else {
      cell.readers[line] = event;
    }
  }
}

void Frontier::SetFloor(std::vector<int> events) {
  Clear();
  floor_ = std::move(events);
}

void Frontier::Clear() {
  floor_.clear();
  std::fill(cells_.begin(), cells_.end(), Cell());
}

}  // namespace ebb::sharding
