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
  for (size_t g = 0; g < residency_.groups.size(); ++g) {
    Swap swap{.group = static_cast<int>(g), .updated = {}};
    int64_t bytes = 0;
    for (int i : residency_.groups[g].stays) {
      const int unit = residency_.stays[i].unit;
      bytes += SwapBytes(plan_.pools.homes, unit, size);
      if (!visited[unit] && IsCarried(unit)) swap.updated.push_back(unit);
      visited[unit] = true;
    }
    swap_of_group_.push_back(bytes > 0 ? static_cast<int>(swaps_.size()) : -1);
    if (bytes > 0) swaps_.push_back(std::move(swap));
  }
}

// Where in the slot of `turn` element `at` of a unit's slice lies.
Place PlanBuilder::InSlot(int turn, int unit, bool trainable, int64_t at) const {
  const int64_t size = SizeOf(d_.compute);
  Place place = plan_.pools.parameter_slots.Slot(turn);
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
  if (swaps_.empty()) {  // a drain: a unit in each slot
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

void PlanBuilder::IssueSwaps(int turns) {
  const int end = std::min(turns, static_cast<int>(swaps_.size()));
  for (; next_swap_ < end; ++next_swap_) {
    const int turn = next_swap_;
    IssueRead(turn, /*carried=*/false);
    if (swaps_[static_cast<size_t>(turn)].updated.empty()) continue;
    IssueRead(turn, /*carried=*/true);
    for (int unit : swaps_[static_cast<size_t>(turn)].updated) {
      IssueUpdate(unit, turn);
      swaps_[static_cast<size_t>(turn)].operations.push_back(update_of_unit_[unit]);
    }
  }
}

// `carried`: of what carried updates bring instead, if there are none.
void PlanBuilder::IssueRead(int turn, bool carried) {
  Swap& swap = swaps_[static_cast<size_t>(turn)];
  Operation read{.kind = OperationKind::kRead,
                 .stream = StreamId::kReadParameters,
                 .parts = {},
                 .after = {},
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
        const int64_t bytes = SwapAligned(piece.count() * size);
        read.moves.push_back({.state = StateClass::kParameter,
                              .from = piece.home,
                              .to = InSlot(turn, unit, trainable, piece.begin),
                              .bytes = bytes});
        read.bytes += bytes;
      }
    }
    if (read.moves.size() == moves) continue;
    read.parts.push_back({.unit = unit});
    read.after.push_back({Dependency::kStored, unit});
  }
  if (read.moves.empty()) return;
  WaitForParameterSlot(turn, read.after);
  swap.operations.push_back(Issue(std::move(read)));
}

// Gathers have taken, and writes have stored, what the slot held before.
void PlanBuilder::WaitForParameterSlot(int turn, std::vector<Dependency>& after) const {
  for (const SlotKind use : {SlotKind::kParameter, SlotKind::kParameterStored})
    after.push_back({Dependency::kSlotFree, plan_.pools.SlotIndex(use, turn)});
}

int PlanBuilder::UploadParameters(const GatherGroup& group, int group_index,
                                  std::vector<Dependency> after) {
  Operation upload{.kind = OperationKind::kUpload,
                   .stream = StreamId::kUpload,
                   .parts = {},
                   .after = std::move(after)};
  const int64_t size = SizeOf(d_.compute);
  const int turn = swap_of_group_[static_cast<size_t>(group_index)];
  if (turn >= 0) {
    IssueSwaps(turn + 1);
    for (int operation : swaps_[static_cast<size_t>(turn)].operations)
      upload.after.push_back({Dependency::kOperation, operation});
    upload.frees = {plan_.pools.SlotIndex(SlotKind::kParameter, turn)};
  }
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
  if (upload.moves.empty()) return -1;
  const int index = Issue(std::move(upload));
  if (turn >= 0) IssueSwaps(turn + 1 + plan_.pools.parameter_slots.count);
  return index;
}

}  // namespace ebb::sharding
