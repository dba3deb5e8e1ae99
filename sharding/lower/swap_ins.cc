#include <algorithm>
#include <utility>

#include "ebb/sharding/lower/emit.h"
#include "ebb/sharding/passes/reduction.h"

namespace ebb::sharding {
namespace {

class SwapInPlanner {
 public:
  explicit SwapInPlanner(const PassInputs& in)
      : in_(in),
        d_(in.plan.decisions),
        table_(in.plan.table),
        parameter_slots_(TurnsOf(Purpose::kParameterSlot)),
        master_users_(static_cast<size_t>(TurnsOf(Purpose::kMasterSlot)), -1) {}

  SwapIns Run();

 private:
  int TurnsOf(Purpose ring) const {
    const int row = table_.Find(ring);
    return row < 0 ? 0 : table_[row].turns;
  }
  bool LivesOnNvme(int unit) const;
  void OfDrain();
  void OfGathers();
  void Share();
  void ShareParameters(int unit, const LastGather& gather);
  void ShareMasters(int unit, const std::vector<LastGather>& gathers);
  size_t FirstNotReadAhead() const;

  const PassInputs& in_;
  const Decisions& d_;
  const Table& table_;
  const int parameter_slots_;
  SwapIns planned_;
  // By master slot, the unit that has it so far; the number of the next slot.
  std::vector<int> master_users_;
  int next_master_slot_ = 0;
};

bool SwapInPlanner::LivesOnNvme(int unit) const {
  const auto pieces = table_.ExtentsOf(table_.Find(Purpose::kParameter, unit));
  return std::any_of(pieces.begin(), pieces.end(),
                     [](const Extent& piece) { return piece.place.tier == Tier::kNvme; });
}

SwapIns SwapInPlanner::Run() {
  const int units = static_cast<int>(in_.plan.layout.units.size());
  planned_.of_update.assign(static_cast<size_t>(units), -1);
  planned_.master_slot.assign(table_.sub_groups.size(), -1);
  for (int unit = 0; unit < units; ++unit) {
    planned_.carried.push_back(in_.kind != PlanKind::kWalk && d_.carried[unit] &&
                               LivesOnNvme(unit));
  }
  if (in_.kind == PlanKind::kDrain) {
    OfDrain();
  } else {
    OfGathers();
    Share();
  }
  return std::move(planned_);
}

void SwapInPlanner::OfDrain() {
  for (const Visit& visit : in_.model.forward) {
    const auto unit = static_cast<size_t>(visit.unit);
    if (!planned_.carried[unit] || planned_.of_update[unit] >= 0) continue;
    const int swap_in = static_cast<int>(planned_.reads.size());
    planned_.of_update[unit] = swap_in;
    planned_.reads.push_back({.units = {static_cast<int>(unit)},
                              .number = swap_in,
                              .updated = {static_cast<int>(unit)}});
  }
}

void SwapInPlanner::OfGathers() {
  std::vector<bool> visited(in_.plan.layout.units.size(), false);
  std::vector<int> users(static_cast<size_t>(parameter_slots_), -1);  // by slot: its last swap-in
  for (const GatherGroup& group : in_.residency.groups) {
    SwapIn swap_in{.units = {}, .issue = group.issue, .updated = {}};
    int64_t bytes = 0;
    for (int i : group.intervals) {
      if (group.from_secondary) break;  // secondary shards are on the device
      const int unit = in_.residency.intervals[i].unit;
      swap_in.units.push_back(unit);
      bytes += SwapBytes(table_, unit);
      if (!visited[unit] && planned_.carried[unit]) swap_in.updated.push_back(unit);
      visited[unit] = true;
    }
    const int index = static_cast<int>(planned_.reads.size());
    planned_.of_group.push_back(bytes > 0 ? index : -1);
    if (bytes == 0) continue;
    for (int unit : swap_in.updated) planned_.of_update[unit] = index;
    const ResidencyInterval& first = in_.residency.intervals[group.intervals.front()];
    swap_in.round = in_.plan.scopes[first.first].round;
    const bool begins =
        index == 0 || (in_.repeats_round() && planned_.reads.back().round < swap_in.round);
    if (!begins) swap_in.number = planned_.reads.back().number + 1;
    int& user = users[swap_in.number % parameter_slots_];
    swap_in.after = std::exchange(user, index);
    planned_.reads.push_back(std::move(swap_in));
  }
}

// Finds the units that share a read between their last gather and their update, as far as slots
// allow. The update must be issued before another read takes the slot.
void SwapInPlanner::Share() {
  if (in_.kind != PlanKind::kStep || !d_.shares_reads || d_.timing != UpdateTiming::kEarly) return;
  const std::vector<LastGather> gathers =
      FindLastGathers(in_.plan.scopes, in_.residency, in_.reduction,
                      static_cast<int>(in_.plan.layout.units.size()));
  for (size_t swap_in = FirstNotReadAhead(); swap_in < planned_.reads.size(); ++swap_in) {
    for (int unit : planned_.reads[swap_in].units) {
      const LastGather& gather = gathers[unit];
      if (planned_.of_group[gather.group] != static_cast<int>(swap_in) || !gather.may_share ||
          !d_.trainable[unit] || planned_.carried[unit] || d_.has_matrices(unit) ||
          !LivesOnNvme(unit))
        continue;
      if (d_.reads_parameters(unit)) {
        ShareParameters(unit, gather);
      } else {
        ShareMasters(unit, gathers);
      }
    }
  }
}

// The first swap-in of the last round that no round in the middle issues ahead. A round in the
// middle reads the same whatever follows. So does the last round if updates read parameters, as
// gathers do.
size_t SwapInPlanner::FirstNotReadAhead() const {
  if (!in_.repeats_round() || master_users_.empty()) return 0;
  const int last_round = d_.rounds - 1;
  const int last_round_begins =
      2 * static_cast<int>(in_.plan.scopes.size()) / d_.rounds * last_round;
  size_t swap_in = 0;
  int ahead = parameter_slots_;
  for (const SwapIn& each : planned_.reads) {
    const bool is_last = each.round == last_round;
    if (is_last && each.issue <= last_round_begins) ++ahead;
    if (is_last && each.number >= ahead) break;
    ++swap_in;
  }
  return swap_in;
}

void SwapInPlanner::ShareParameters(int unit, const LastGather& gather) {
  const int swap_in = planned_.of_group[gather.group];
  const auto next = static_cast<size_t>(swap_in + parameter_slots_);
  if (next < planned_.reads.size()) {
    if (planned_.reads[next].issue <= gather.updated) return;
    planned_.reads[next].behind.push_back(unit);
  }
  planned_.of_update[unit] = swap_in;
  planned_.reads[swap_in].shared.push_back(unit);
}

void SwapInPlanner::ShareMasters(int unit, const std::vector<LastGather>& gathers) {
  const LastGather& gather = gathers[unit];
  const int swap_in = planned_.of_group[gather.group];
  SwapIn& read = planned_.reads[swap_in];
  std::vector<int> groups, behind;
  for (const int g : table_.SubGroupNumbersOf(unit)) {
    const SubGroup& group = table_.sub_groups[g];
    if (SharesMasters(d_, group, ParameterTierOf(table_, group))) groups.push_back(g);
  }
  if (groups.empty() || groups.size() > master_users_.size()) return;
  const auto user_of = [&](size_t slot) -> int& {
    return master_users_[slot % master_users_.size()];
  };
  for (size_t i = 0; i < groups.size(); ++i) {
    const int user = user_of(static_cast<size_t>(next_master_slot_) + i);
    if (user < 0) continue;
    if (read.issue <= gathers[user].updated) return;
    behind.push_back(user);
  }
  for (int g : groups) {
    user_of(static_cast<size_t>(next_master_slot_)) = unit;
    planned_.master_slot[g] = next_master_slot_++;
  }
  planned_.of_update[unit] = swap_in;
  read.shared.push_back(unit);
  read.behind.insert(read.behind.end(), behind.begin(), behind.end());
}

}  // namespace

SwapIns PlanSwapIns(const PassInputs& in) {
  return SwapInPlanner(in).Run();
}

Place InSlot(const Plan& plan, const SwapIn& swap_in, int unit, bool trainable, int64_t at) {
  const Table& table = plan.table;
  Place place = table.TurnOf(table.Find(Purpose::kParameterSlot), swap_in.number);
  for (int other : swap_in.units) {
    const int64_t size = SizeOf(plan.decisions.compute_of(other));
    for (const bool of_trainable : {true, false}) {
      const int row = table.Find(Purpose::kParameter, other, of_trainable);
      for (const Extent& piece : table.ExtentsOf(row)) {
        if (piece.place.tier != Tier::kNvme) continue;
        if (other == unit && of_trainable == trainable)
          return place.Plus((at - piece.begin) * size);
        place.offset += SwapAligned(piece.count() * size);
      }
    }
  }
  return place;
}

}  // namespace ebb::sharding
