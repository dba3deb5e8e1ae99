#include "order_check.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ebb::sharding {
namespace {

struct Bytes {
  std::pair<Tier, StateClass> pool;
  int64_t begin = 0, end = 0;
};

// Bytes of the rank with this slice. On NVMe there are two files: of parameters, and of all else.
Bytes BytesOf(const Operand& operand, const Decisions& decisions, int slice) {
  const Place& place = operand.place;
  const bool is_state = place.tier == Tier::kNvme && place.pool != StateClass::kParameter;
  const int part = place.of_secondary ? slice % decisions.secondary_shards : slice;
  const int64_t begin = place.offset + part * place.per_slice;
  return {.pool = {place.tier, is_state ? StateClass::kMaster : place.pool},
          .begin = begin,
          .end = begin + operand.bytes()};
}

bool IsControl(const Operand& operand) {
  return operand.place.pool == StateClass::kControl;
}

}  // namespace

RankTouches::RankTouches(std::span<const OpList* const> lists, const Decisions& decisions,
                         int rank) {
  const ControlCells control(static_cast<int>(decisions.trainable.size()));
  const int slice = rank % decisions.shards;
  const auto for_each = [&](const Op& op, auto visit) {
    for (const Operand& operand : op.operands)
      if (operand.access != Access::kNone && operand.count > 0) visit(operand);
  };
  std::map<std::pair<Tier, StateClass>, std::vector<int64_t>> cuts;
  for (const OpList* list : lists) {
    for (const Op& op : list->ops) {
      for_each(op, [&](const Operand& operand) {
        if (IsControl(operand)) return;
        const Bytes bytes = BytesOf(operand, decisions, slice);
        cuts[bytes.pool].insert(cuts[bytes.pool].end(), {bytes.begin, bytes.end});
      });
    }
  }
  stretches_ = static_cast<int>(control.count());
  std::map<std::pair<Tier, StateClass>, int> first;
  for (auto& [pool, at] : cuts) {
    std::sort(at.begin(), at.end());
    at.erase(std::unique(at.begin(), at.end()), at.end());
    first[pool] = stretches_;
    stretches_ += static_cast<int>(at.size());
  }
  for (const OpList* list : lists) {
    for (const Op& op : list->ops) {
      for_each(op, [&](const Operand& operand) {
        const bool writes = Writes(operand.access);
        if (IsControl(operand)) {
          for (int64_t cell = operand.place.offset; cell < operand.place.offset + operand.count;
               ++cell) {
            const int at = static_cast<int>(cell);
            touches_.push_back({at, at + 1, writes, control.by_parity(cell)});
          }
          return;
        }
        const Bytes bytes = BytesOf(operand, decisions, slice);
        const std::vector<int64_t>& at = cuts[bytes.pool];
        const auto stretch = [&](int64_t byte) {
          return first[bytes.pool] +
                 static_cast<int>(std::lower_bound(at.begin(), at.end(), byte) - at.begin());
        };
        touches_.push_back({stretch(bytes.begin), stretch(bytes.end), writes, false});
      });
      first_touch_.push_back(touches_.size());
    }
  }
}

OrderCheck::OrderCheck(std::span<const OpList* const> lists, const Cells& cells,
                       const RankTouches& touches, std::optional<TakenWait> without)
    : lists_(lists),
      touches_(touches),
      without_(without),
      frontier_(cells.count()),
      stretches_(static_cast<size_t>(touches.stretches())) {
  const auto add_event = [&](int op, Line line) {
    op_of_event_.push_back(op);
    return frontier_.AddEvent(line);
  };
  for (const OpList* list : lists_) {
    first_.push_back(static_cast<int>(events_.size()));
    for (size_t index = 0; index < list->ops.size(); ++index) {
      const Op& each = list->ops[index];
      const bool awaited = list->waits[index].awaited;
      const int number = static_cast<int>(events_.size());
      const int event = awaited ? add_event(number, each.ends) : -1;
      events_.push_back({event, awaited && each.by_parity ? add_event(number, each.ends) : event});
    }
  }
  for (Line line = 0; line < kAsyncReads; ++line) floor_.push_back(add_event(-1, line));
  things_.assign(events_.size(), HappensBefore::kStart);
  thing_of_event_.assign(op_of_event_.size(), HappensBefore::kStart);
  for (Stretch& stretch : stretches_) stretch.readers.fill(HappensBefore::kStart);
}

void OrderCheck::Run(int list, int begin, int end, int parity) {
  for (int index = begin; index < end && complaint_.empty(); ++index) Add(list, index, parity);
}

void OrderCheck::Add(int list, int index, int parity) {
  const int number = first_[static_cast<size_t>(list)] + index;
  const Op& op = lists_[static_cast<size_t>(list)]->ops[static_cast<size_t>(index)];
  const Waits& waits = lists_[static_cast<size_t>(list)]->waits[static_cast<size_t>(index)];
  std::vector<int> after;
  const auto wait = [&](int awaited, bool through_frontier, int thing) {
    const TakenWait taken{number, awaited, through_frontier};
    if (!without_ && awaited >= 0 && !order_.IsOver(thing, op.starts)) waits_.insert(taken);
    if (taken != without_) after.push_back(thing);
  };
  const auto event_of = [&](int of) {
    return events_[static_cast<size_t>(of)][static_cast<size_t>(parity)];
  };
  for (int other : waits.on) {
    const int awaited = first_[static_cast<size_t>(list)] + other;
    wait(awaited, false, things_[static_cast<size_t>(awaited)]);
    frontier_.Follow(op.starts, event_of(awaited));
  }
  frontier_.Enter(op.starts, waits.enters, parity, [&](int event) {
    const auto of = static_cast<size_t>(event);
    wait(op_of_event_[of], true, thing_of_event_[of]);
  });
  const int thing = order_.Add(op.starts, op.ends, after);
  op_of_thing_.push_back(number);
  const int event = event_of(number);
  frontier_.Issue(op.starts, op.ends, event);
  if (event >= 0) {
    thing_of_event_[static_cast<size_t>(event)] = thing;
    frontier_.Leave(waits.leaves, parity, event);
  }
  things_[static_cast<size_t>(number)] = thing;
  TouchAll(thing, number, op.ends, parity, op.carried());
}

void OrderCheck::RunAlone(int list, int index) {
  const Op& op = lists_[static_cast<size_t>(list)]->ops[static_cast<size_t>(index)];
  const int number = first_[static_cast<size_t>(list)] + index;
  const int thing = order_.Add(op.starts, op.ends, {});
  op_of_thing_.push_back(number);
  frontier_.Issue(op.starts, op.ends, -1);
  TouchAll(thing, number, op.ends, /*parity=*/0, op.carried());
}

void OrderCheck::TouchAll(int thing, int op, Line line, int parity, bool carried) {
  const auto follows = [&](int other) {
    if (other != thing && !order_.Before(other, thing)) Complain(thing, other);
  };
  for (const RankTouches::Touch& touch : touches_.Of(op)) {
    const int flipped = touch.by_parity && (parity == 1) != carried ? 1 : 0;
    for (int at = touch.begin; at < touch.end; ++at) {
      Stretch& stretch = stretches_[static_cast<size_t>(at ^ flipped)];
      follows(stretch.writer);
      if (touch.writes) {
        for (int reader : stretch.readers) follows(reader);
        stretch.writer = thing;
        stretch.readers.fill(HappensBefore::kStart);
      } else {
        stretch.readers[line] = thing;
      }
    }
  }
}

void OrderCheck::Complain(int thing, int other) {
  if (!complaint_.empty()) return;
  const auto name = [&](int of) {
    const int number = op_of_thing_[static_cast<size_t>(of)];
    if (number < 0) return std::string("a fence");
    const size_t list = static_cast<size_t>(std::upper_bound(first_.begin(), first_.end(), number) -
                                            first_.begin() - 1);
    const auto index = static_cast<size_t>(number - first_[list]);
    const Op& op = lists_[list]->ops[index];
    return absl::StrCat(std::string(sharding::Name(op.role)), " (operation ", index, " of list ",
                        list, ")");
  };
  complaint_ = absl::StrCat(name(thing), " may start before ", name(other), " is over");
}

int OrderCheck::AddFence(Line line, std::span<const int> after) {
  op_of_thing_.push_back(-1);
  return order_.Add(line, line, after);
}

// One on each line of steps.
std::vector<int> OrderCheck::AddToSteps(std::span<const int> after) {
  std::vector<int> things;
  for (Line line = 0; line < kAsyncReads; ++line) things.push_back(AddFence(line, after));
  return things;
}

void OrderCheck::WaitForSteps() {
  const std::vector<int> ends = AddToSteps({});
  AddToSteps(ends);
  AddFence(kAsyncReads, ends);
}

void OrderCheck::WaitForReads() {
  AddToSteps({{AddFence(kAsyncReads, {})}});
}

void OrderCheck::WaitIdle() {
  WaitForReads();
  WaitForSteps();
  frontier_.Clear();
}

void OrderCheck::EndEarly() {
  const std::vector<int> ends = AddToSteps({});
  for (Line line = 0; line < kAsyncReads; ++line) {
    frontier_.Issue(line, line, floor_[line]);
    thing_of_event_[static_cast<size_t>(floor_[line])] = ends[line];
  }
  frontier_.SetFloor(floor_);
}

void OrderCheck::Fence() {
  EndEarly();
  std::vector<int> ends;
  for (int event : floor_) ends.push_back(thing_of_event_[static_cast<size_t>(event)]);
  AddToSteps(ends);
  for (Line line = 0; line < kAsyncReads; ++line)
    for (int event : floor_) frontier_.Follow(line, event);
}

}  // namespace ebb::sharding
