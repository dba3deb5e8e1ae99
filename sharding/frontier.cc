#include "ebb/sharding/frontier.h"

#include <algorithm>
#include <utility>

namespace ebb::sharding {

Frontier::Frontier(int cells) : cells_(static_cast<size_t>(cells)) {}

int Frontier::AddEvent(Line line) {
  events_.push_back({.line = line});
  not_over_.reserve(events_.capacity());  // holds each event at most once
  return static_cast<int>(events_.size()) - 1;
}

void Frontier::Follow(Line line, int event) {
  const Recorded& of = events_[event];
  Clock& clock = clocks_[line];
  for (size_t l = 0; l < clock.size(); ++l) clock[l] = std::max(clock[l], of.clock[l]);
  clock[of.line] = std::max(clock[of.line], of.number);
}

// If the lines differ, the operation counts on `ends`, after all that was issued there. The next
// operation on `starts` does not wait for it.
void Frontier::Issue(Line starts, Line ends, int event) {
  const int64_t number = ++issued_[ends];
  Clock& clock = clocks_[ends];
  if (starts != ends) {
    for (size_t l = 0; l < clock.size(); ++l) clock[l] = std::max(clock[l], clocks_[starts][l]);
  }
  clock[ends] = number;
  if (event < 0) return;
  Recorded& of = events_[event];
  of.number = number;
  of.order = ++recorded_;
  of.clock = clock;
}

std::span<const int> Frontier::FindNotOver(Line line, std::span<const CellUse> uses, int parity) {
  not_over_.clear();
  ++search_;
  const auto add = [&](int event) {
    if (event < 0 || Covers(line, event)) return;
    if (std::exchange(events_[event].search, search_) != search_) not_over_.push_back(event);
  };
  if (!uses.empty()) std::for_each(floor_.begin(), floor_.end(), add);
  for (const CellUse& use : uses) {
    const Cell& cell = cells_[At(use, parity)];
    add(cell.writer);
    if (use.writes) std::for_each(cell.readers.begin(), cell.readers.end(), add);
  }
  std::sort(not_over_.begin(), not_over_.end(),
            [this](int a, int b) { return events_[a].order > events_[b].order; });
  return not_over_;
}

void Frontier::Leave(std::span<const CellUse> uses, int parity, int event) {
  const Line line = events_[event].line;
  for (const CellUse& use : uses) {
    Cell& cell = cells_[At(use, parity)];
    if (use.writes) {
      cell.writer = event;
      cell.readers = None();
    } else {
      cell.readers[line] = event;
    }
  }
}

void Frontier::SetFloor(std::vector<int> events) {
  std::array<bool, kLines> ended{};
  for (int event : events) ended[events_[event].line] = true;
  const auto has_ended = [&](int use) { return use >= 0 && ended[events_[use].line]; };
  for (Cell& cell : cells_) {
    if (has_ended(cell.writer)) cell.writer = -1;
    std::replace_if(cell.readers.begin(), cell.readers.end(), has_ended, -1);
  }
  floor_ = std::move(events);
}

void Frontier::Clear() {
  floor_.clear();
  std::fill(cells_.begin(), cells_.end(), Cell());
}

}  // namespace ebb::sharding
