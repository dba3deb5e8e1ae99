// What gathers take from below the device. A rank's slice goes from host memory straight to its
// place in the unit's slot, where the gather finds it; what is on NVMe is read into host slots
// before, a group of gathers in each, as many groups ahead as there are slots:
//
//   read      g0 g1 g2 | g3      g4
//   upload             g0    g1     g2        the slot of g0 is free for g3
//   gather                g0    g1     g2
//
// Where the updates of the step before are carried into this one, the first visit's parameters are
// not read: the update puts them into the slot.
//
// Where updates are early, the last gather of a unit and its update share a read. An update that
// reads parameters finds them in the slot, where it also leaves them. Of one that reads masters the
// masters are read instead of the parameters, into slots of their own; the gather has a copy.
#include <algorithm>
#include <utility>

#include "ebb/sharding/plan_builder.h"

namespace ebb::sharding {
namespace {

bool LivesOnNvme(const std::vector<ParameterPiece>& pieces) {
  return std::any_of(pieces.begin(), pieces.end(),
                     [](const ParameterPiece& piece) { return piece.home.tier == Tier::kNvme; });
}

}  // namespace

bool PlanBuilder::IsCarried(int unit) const {
  return carries_ && d_.carried[unit] &&
         LivesOnNvme(plan_.pools.homes.units[static_cast<size_t>(unit)].trainable);
}

void PlanBuilder::FindSwaps() {
  const int64_t size = SizeOf(d_.compute);
  std::vector<bool> visited(plan_.layout.units.size(), false);
  std::vector<int> users(static_cast<size_t>(plan_.pools.parameter_slots.count), -1);  // turns
  for (size_t g = 0; g < residency_.groups.size(); ++g) {
    Swap swap{.group = static_cast<int>(g), .updated = {}};
    int64_t bytes = 0;
    for (int i : residency_.groups[g].stays) {
      if (residency_.groups[g].from_secondary) break;  // which lies on the device
      const int unit = residency_.stays[i].unit;
      bytes += SwapBytes(plan_.pools.homes, unit, size);
      if (!visited[unit] && IsCarried(unit)) swap.updated.push_back(unit);
      visited[unit] = true;
    }
    const int turn = static_cast<int>(swaps_.size());
    swap_of_group_.push_back(bytes > 0 ? turn : -1);
    if (bytes == 0) continue;
    const Stay& first = residency_.stays[static_cast<size_t>(residency_.groups[g].stays.front())];
    swap.round = plan_.scopes[static_cast<size_t>(first.first)].round;
    const bool begins = turn == 0 || (Repeats() && swaps_.back().round < swap.round);
    if (!begins) swap.number = swaps_.back().number + 1;
    int& user = users[static_cast<size_t>(swap.number % plan_.pools.parameter_slots.count)];
    swap.after = std::exchange(user, turn);
    swaps_.push_back(std::move(swap));
  }
}

// Where in the slot of `turn` element `at` of a unit's slice lies.
Place PlanBuilder::InSlot(int turn, int unit, bool trainable, int64_t at) const {
  const int64_t size = SizeOf(d_.compute);
  const SlotRing& slots = plan_.pools.parameter_slots;
  const bool drains = swaps_.empty();  // a unit in each slot
  Place place = slots.Slot(drains ? turn : swaps_[static_cast<size_t>(turn)].number);
  const auto skip = [&](int other, bool of_trainable) {
    for (const ParameterPiece& piece :
         plan_.pools.homes.units[static_cast<size_t>(other)].pieces(of_trainable)) {
      if (piece.home.tier != Tier::kNvme) continue;
      if (other == unit && of_trainable == trainable) {
        place.offset += (at - piece.begin) * size;
        return true;
      }
      place.offset += SwapAligned(piece.count() * size);
    }
    return false;
  };
  if (drains) {
    skip(unit, trainable);
    return place;
  }
  for (int i :
       residency_.groups[static_cast<size_t>(swaps_[static_cast<size_t>(turn)].group)].stays) {
    const int other = residency_.stays[i].unit;
    if (skip(other, true) || skip(other, false)) return place;
  }
  return place;
}

void PlanBuilder::IssueSwaps() {
  for (; next_swap_ < static_cast<int>(swaps_.size()) && MayRead(next_swap_); ++next_swap_) {
    const int turn = next_swap_;
    ReadSharedMasters(turn);
    IssueRead(turn, /*carried=*/false);
    NarrowSharedMasters(turn);
    if (swaps_[static_cast<size_t>(turn)].updated.empty()) continue;
    IssueRead(turn, /*carried=*/true);
    for (int unit : swaps_[static_cast<size_t>(turn)].updated) IssueUpdate(unit, turn);
  }
}

// `carried`: of what carried updates bring instead, if there are none.
void PlanBuilder::IssueRead(int turn, bool carried) {
  Swap& swap = swaps_[static_cast<size_t>(turn)];
  OperationDraft read{.kind = OperationKind::kRead,
                      .stream = StreamId::kReadParameters,
                      .parts = {},
                      .condition = carried ? Condition::kNotCarrying : Condition::kAlways};
  const int64_t size = SizeOf(d_.compute);
  for (int i : residency_.groups[static_cast<size_t>(swap.group)].stays) {
    const int unit = residency_.stays[i].unit;
    const bool is_updated =
        std::find(swap.updated.begin(), swap.updated.end(), unit) != swap.updated.end();
    const size_t moves = read.moves.size();
    for (const bool trainable : {true, false}) {
      if (carried != (is_updated && trainable)) continue;
      for (const ParameterPiece& piece :
           plan_.pools.homes.units[static_cast<size_t>(unit)].pieces(trainable)) {
        if (piece.home.tier != Tier::kNvme) continue;
        for (const auto& [begin, end] : NotNarrowed(turn, unit, trainable, piece)) {
          const int64_t bytes = SwapAligned((end - begin) * size);
          read.moves.push_back({.state = StateClass::kParameter,
                                .from = piece.home.Plus((begin - piece.begin) * size),
                                .to = InSlot(turn, unit, trainable, begin),
                                .bytes = bytes});
          read.bytes += bytes;
        }
      }
    }
    if (read.moves.size() == moves) continue;
    read.parts.push_back({.unit = unit});
  }
  if (read.moves.empty()) return;
  read.of_update = d_.reads_parameters() && !swap.shared.empty() && !carried;
  Issue(read);
}

// What a read brings of a piece: all but the sub-groups whose masters are read instead.
std::vector<std::pair<int64_t, int64_t>> PlanBuilder::NotNarrowed(
    int turn, int unit, bool trainable, const ParameterPiece& piece) const {
  if (!trainable || d_.reads_parameters() || shared_turn_[unit] != turn)
    return {{piece.begin, piece.end}};
  std::vector<std::pair<int64_t, int64_t>> ranges;
  const UnitHomes& homes = plan_.pools.homes.units[static_cast<size_t>(unit)];
  for (int g = homes.first_sub_group; g < homes.first_sub_group + homes.sub_groups; ++g) {
    const SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(g)];
    if (group.begin < piece.begin || group.begin >= piece.end ||
        master_turn_[static_cast<size_t>(g)] >= 0)
      continue;
    if (!ranges.empty() && ranges.back().second == group.begin) {
      ranges.back().second = group.end;
    } else {
      ranges.emplace_back(group.begin, group.end);
    }
  }
  return ranges;
}

// Which units' last gathers share a read with their updates, as far as slots allow: what is there
// until an update has used it must be free when somebody else needs the slot at the latest, in the
// order in which operations are issued.
void PlanBuilder::FindSharedReads() {
  if (!carries_ || !d_.shares_reads || d_.timing != UpdateTiming::kEarly) return;
  const std::vector<LastGather> gathers = FindLastGathers(
      plan_.scopes, residency_, reduction_, static_cast<int>(plan_.layout.units.size()));
  std::vector<int> users(static_cast<size_t>(plan_.pools.master_slots.count), -1);
  for (size_t turn = static_cast<size_t>(FirstNotReadAhead()); turn < swaps_.size(); ++turn) {
    const Swap& swap = swaps_[turn];
    for (int i : residency_.groups[static_cast<size_t>(swap.group)].stays) {
      const int unit = residency_.stays[i].unit;
      const LastGather& gather = gathers[static_cast<size_t>(unit)];
      if (gather.stay != i || !gather.may_share || !d_.trainable[unit] || IsCarried(unit) ||
          !LivesOnNvme(plan_.pools.homes.units[static_cast<size_t>(unit)].trainable))
        continue;
      if (d_.reads_parameters()) {
        ShareParameters(unit, gather);
      } else {
        ShareMasters(unit, gathers, users);
      }
    }
  }
}

// Of the turns of the last round, which a round in the middle does not read: it reads the same whatever follows.
int PlanBuilder::FirstNotReadAhead() const {
  if (!Repeats()) return 0;
  const int last_round = d_.rounds - 1;
  const int seam = TicksOfRound() * last_round;
  int turn = 0, ahead = plan_.pools.parameter_slots.count;
  for (const Swap& swap : swaps_) {
    const bool is_last = swap.round == last_round;
    if (is_last && residency_.groups[static_cast<size_t>(swap.group)].issue <= seam) ++ahead;
    if (is_last && swap.number >= ahead) break;
    ++turn;
  }
  return turn;
}

void PlanBuilder::ShareParameters(int unit, const LastGather& gather) {
  const int turn = swap_of_group_[static_cast<size_t>(gather.group)];
  const size_t next = static_cast<size_t>(turn + plan_.pools.parameter_slots.count);
  if (next < swaps_.size()) {
    if (residency_.groups[static_cast<size_t>(swaps_[next].group)].issue <= gather.updated) return;
    swaps_[next].behind.push_back(unit);
  }
  shared_turn_[unit] = turn;
  swaps_[static_cast<size_t>(turn)].shared.push_back(unit);
}

// `users`: by slot, the unit that has it so far.
void PlanBuilder::ShareMasters(int unit, const std::vector<LastGather>& gathers,
                               std::vector<int>& users) {
  const LastGather& gather = gathers[static_cast<size_t>(unit)];
  const int issue = residency_.groups[static_cast<size_t>(gather.group)].issue;
  const UnitHomes& homes = plan_.pools.homes.units[static_cast<size_t>(unit)];
  std::vector<int> groups, behind;
  for (int g = homes.first_sub_group; g < homes.first_sub_group + homes.sub_groups; ++g) {
    const SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(g)];
    if (SharesMasters(d_, plan_.pools.homes, group)) groups.push_back(g);
  }
  if (groups.empty() || groups.size() > users.size()) return;
  for (size_t i = 0; i < groups.size(); ++i) {
    const int user = users[(static_cast<size_t>(next_master_slot_) + i) % users.size()];
    if (user < 0) continue;
    if (issue <= gathers[static_cast<size_t>(user)].updated) return;
    behind.push_back(user);
  }
  for (int g : groups) {
    users[static_cast<size_t>(next_master_slot_) % users.size()] = unit;
    master_turn_[static_cast<size_t>(g)] = next_master_slot_++;
  }
  const int turn = swap_of_group_[static_cast<size_t>(gather.group)];
  Swap& swap = swaps_[static_cast<size_t>(turn)];
  shared_turn_[unit] = turn;
  swap.shared.push_back(unit);
  swap.behind.insert(swap.behind.end(), behind.begin(), behind.end());
}

bool PlanBuilder::MayRead(int turn) const {
  const Swap& swap = swaps_[static_cast<size_t>(turn)];
  if (swap.after >= uploaded_swaps_ || swap.round > round_ + 1) return false;
  const std::vector<int>& behind = swap.behind;
  return std::all_of(behind.begin(), behind.end(),
                     [&](int unit) { return updated_[static_cast<size_t>(unit)] != 0; });
}

void PlanBuilder::ReadSharedMasters(int turn) {
  Swap& swap = swaps_[static_cast<size_t>(turn)];
  if (d_.reads_parameters() || swap.shared.empty()) return;
  const Pools& pools = plan_.pools;
  OperationDraft read{.kind = OperationKind::kRead,
                      .stream = StreamId::kReadParameters,
                      .parts = {},
                      .of_update = true};
  for (int unit : swap.shared) {
    const UnitHomes& homes = pools.homes.units[static_cast<size_t>(unit)];
    read.parts.push_back({.unit = unit});
    for (int g = homes.first_sub_group; g < homes.first_sub_group + homes.sub_groups; ++g) {
      const int slot = master_turn_[static_cast<size_t>(g)];
      if (slot < 0) continue;
      const SubGroup& group = pools.homes.sub_groups[static_cast<size_t>(g)];
      const int64_t bytes = SwapAligned(group.count() * d_.master_size());
      read.moves.push_back({.state = StateClass::kMaster,
                            .from = group.master,
                            .to = pools.master_slots.Slot(slot),
                            .bytes = bytes});
      read.bytes += bytes;
    }
  }
  Issue(read);
}

// On the stream of the reads, where their ends are.
void PlanBuilder::NarrowSharedMasters(int turn) {
  Swap& swap = swaps_[static_cast<size_t>(turn)];
  if (d_.reads_parameters() || swap.shared.empty()) return;
  OperationDraft narrow{
      .kind = OperationKind::kNarrow, .stream = StreamId::kReadParameters, .parts = {}};
  for (int unit : swap.shared) {
    const UnitHomes& homes = plan_.pools.homes.units[static_cast<size_t>(unit)];
    for (int g = homes.first_sub_group; g < homes.first_sub_group + homes.sub_groups; ++g) {
      const int slot = master_turn_[static_cast<size_t>(g)];
      if (slot < 0) continue;
      const SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(g)];
      narrow.parts.push_back({.unit = unit, .work = static_cast<int>(plan_.narrowings.size())});
      plan_.narrowings.push_back({.unit = unit,
                                  .sub_group = g,
                                  .master = plan_.pools.master_slots.Slot(slot),
                                  .parameter = InSlot(turn, unit, true, group.begin)});
      narrow.bytes += group.count() * (d_.master_size() + SizeOf(d_.compute));
    }
  }
  Issue(narrow);
}

void PlanBuilder::UploadParameters(const GatherGroup& group, int group_index) {
  OperationDraft upload{.kind = OperationKind::kUpload, .stream = StreamId::kUpload, .parts = {}};
  const int64_t size = SizeOf(d_.compute);
  const int turn = swap_of_group_[static_cast<size_t>(group_index)];
  if (turn >= 0) IssueSwaps();
  for (int i : group.stays) {
    const int unit = residency_.stays[i].unit;
    const size_t moves = upload.moves.size();
    for (const bool trainable : {true, false}) {
      const Section& section =
          trainable ? plan_.layout.units[unit].trainable : plan_.layout.units[unit].frozen;
      const UnitAddresses& addresses = plan_.pools.units[unit];
      const Place slot{.tier = Tier::kDevice,
                       .pool = StateClass::kGather,
                       .offset = trainable ? addresses.gather_trainable : addresses.gather_frozen,
                       .per_slice = section.shard * size};
      for (const ParameterPiece& piece :
           plan_.pools.homes.units[static_cast<size_t>(unit)].pieces(trainable)) {
        if (piece.home.tier == Tier::kDevice) continue;
        const bool in_cpu = piece.home.tier == Tier::kCpu;
        upload.moves.push_back(
            {.state = StateClass::kParameter,
             .from = in_cpu ? piece.home : InSlot(turn, unit, trainable, piece.begin),
             .to = slot.Plus(piece.begin * size),
             .bytes = piece.count() * size});
        upload.bytes += piece.count() * size;
      }
    }
    if (upload.moves.size() > moves) upload.parts.push_back({.unit = unit});
  }
  if (upload.moves.empty()) return;
  Issue(upload);
  if (turn < 0) return;
  uploaded_swaps_ = turn + 1;
  IssueSwaps();
}

}  // namespace ebb::sharding
