#include "ebb/sharding/lower/lower_gathers.h"

#include "ebb/sharding/table.h"

namespace ebb::sharding {

void GatherLowering::Read(int swap_in) {
  const SwapIn& read = swap_ins_.reads[swap_in];
  const bool reads_masters = std::any_of(read.shared.begin(), read.shared.end(),
                                         [this](int unit) { return !d_.reads_parameters(unit); });
  if (reads_masters) ReadMasters(read);
  ReadParameters(swap_in, /*carried=*/false);
  if (reads_masters) CastMasters(read);
  if (!read.updated.empty()) ReadParameters(swap_in, /*carried=*/true);
}

std::vector<int> GatherLowering::SharedSubGroups(int unit) const {
  std::vector<int> shared;
  for (const int g : table_.SubGroupNumbersOf(unit))
    if (swap_ins_.shares_masters(g)) shared.push_back(g);
  return shared;
}

Place GatherLowering::MasterSlotOf(int sub_group) const {
  return table_.TurnOf(table_.Find(Purpose::kMasterSlot), swap_ins_.master_slot[sub_group]);
}

void GatherLowering::ReadMasters(const SwapIn& swap_in) {
  OpDraft read{.role = Role::kRead, .stream = StreamId::kReadParameters};
  for (int unit : swap_in.shared) {
    if (d_.reads_parameters(unit)) continue;
    read.parts.push_back({.unit = unit});
    for (int g : SharedSubGroups(unit)) {
      const SubGroup& group = table_.sub_groups[g];
      read.bytes += to_.Move(StateClass::kMaster,
                             table_.PlaceOfSubGroup(table_.Find(Purpose::kMaster, unit), g),
                             MasterSlotOf(g), SwapAligned(d_.MasterBytes(unit, group.count())));
    }
  }
  writer_.Issue(read);
}

// On the stream of the reads, where their ends are.
void GatherLowering::CastMasters(const SwapIn& swap_in) {
  OpDraft cast{.role = Role::kCastMasters, .stream = StreamId::kReadParameters};
  for (int unit : swap_in.shared) {
    for (int g : SharedSubGroups(unit)) {
      const SubGroup& group = table_.sub_groups[g];
      cast.parts.push_back({.unit = unit});
      cast.updates.push_back({.sub_group = g});
      to_.Add(MasterSlotOf(g), DType::kFloat32, Access::kRead, group.count());
      to_.Add(InSlot(in_.plan, swap_in, unit, true, group.begin), d_.compute_of(unit),
              Access::kWrite, group.count());
      cast.bytes +=
          d_.MasterBytes(unit, group.count()) + group.count() * SizeOf(d_.compute_of(unit));
    }
  }
  writer_.Issue(cast);
}

void GatherLowering::ReadParameters(int swap_in, bool carried) {
  const SwapIn& of = swap_ins_.reads[swap_in];
  OpDraft read{.role = Role::kRead,
               .stream = StreamId::kReadParameters,
               .when = carried ? When::kNotCarrying : When::kAlways};
  for (int unit : of.units) {
    const int64_t size = SizeOf(d_.compute_of(unit));
    const bool is_updated =
        std::find(of.updated.begin(), of.updated.end(), unit) != of.updated.end();
    const int64_t before = read.bytes;
    for (const bool trainable : {true, false}) {
      if (carried != (is_updated && trainable)) continue;
      const int row = table_.Find(Purpose::kParameter, unit, trainable);
      for (const Extent& piece : table_.ExtentsOf(row)) {
        if (piece.place.tier != Tier::kNvme) continue;
        for (const auto& [begin, end] : NotCast(swap_in, unit, trainable, piece)) {
          read.bytes += to_.Move(
              StateClass::kParameter, piece.place.Plus((begin - piece.begin) * size),
              InSlot(in_.plan, of, unit, trainable, begin), SwapAligned((end - begin) * size));
        }
      }
    }
    if (read.bytes > before) read.parts.push_back({.unit = unit});
  }
  if (read.bytes > 0) writer_.Issue(read);
}

// The part of a piece that a read brings: all but sub-groups with masters that are read instead.
GatherLowering::Ranges GatherLowering::NotCast(int swap_in, int unit, bool trainable,
                                               const Extent& piece) const {
  const bool casts = trainable && !d_.reads_parameters(unit) && !swap_ins_.carried[unit] &&
                     swap_ins_.of_update[unit] == swap_in;
  if (!casts) return {{piece.begin, piece.end}};
  Ranges ranges;
  for (const int g : table_.SubGroupNumbersOf(unit)) {
    const SubGroup& group = table_.sub_groups[g];
    if (group.begin < piece.begin || group.begin >= piece.end || swap_ins_.shares_masters(g))
      continue;
    if (!ranges.empty() && ranges.back().second == group.begin) {
      ranges.back().second = group.end;
    } else {
      ranges.emplace_back(group.begin, group.end);
    }
  }
  return ranges;
}

void GatherLowering::Upload(int index) {
  OpDraft upload{.role = Role::kUpload, .stream = StreamId::kUpload};
  const int swap_in = swap_ins_.of_group[index];
  for (int i : in_.residency.groups[index].intervals) {
    const int unit = in_.residency.intervals[i].unit;
    const int64_t size = SizeOf(d_.compute_of(unit));
    const int64_t before = upload.bytes;
    for (const bool trainable : {true, false}) {
      const int to = GatheredFrom(table_, unit, trainable);
      for (const Extent& piece :
           table_.ExtentsOf(table_.Find(Purpose::kParameter, unit, trainable))) {
        if (piece.place.tier == Tier::kDevice) continue;
        const Place from =
            piece.place.tier == Tier::kCpu
                ? piece.place
                : InSlot(in_.plan, swap_ins_.reads[swap_in], unit, trainable, piece.begin);
        upload.bytes += to_.Move(StateClass::kParameter, from, table_.OwnSlice(to, piece.begin),
                                 piece.count() * size);
      }
    }
    if (upload.bytes > before) upload.parts.push_back({.unit = unit});
  }
  if (upload.bytes > 0) writer_.Issue(upload);
}

void GatherLowering::Gather(int index) {
  const GatherGroup& group = in_.residency.groups[index];
  OpDraft gather{.role = group.from_secondary ? Role::kGatherSecondary : Role::kGather,
                 .stream = StreamId::kGather};
  for (int i : group.intervals) {
    const ResidencyInterval& interval = in_.residency.intervals[i];
    const UnitLayout& unit = in_.plan.layout.units[interval.unit];
    const DType dtype = d_.compute_of(interval.unit);
    gather.parts.push_back({.unit = interval.unit, .scope = interval.first});
    if (group.from_secondary) {
      const int64_t part = d_.SecondaryShard(unit.trainable) + d_.SecondaryShard(unit.frozen);
      gather.bytes += (d_.secondary_shards - 1) * part * SizeOf(dtype);
      AddSecondary(interval.unit, /*fills=*/false);
    } else {
      gather.bytes += d_.RingBytes(unit.shard(), dtype);
      AddGather(table_, interval.unit, to_.operands());
    }
  }
  const int gathered = writer_.Issue(gather);
  for (int i : group.intervals) {
    const ResidencyInterval& interval = in_.residency.intervals[i];
    for (int s = interval.first; s <= interval.last; ++s)
      if (in_.plan.scopes[s].unit == interval.unit) writer_.Gathers(s, gathered);
  }
  Fill(group);
}

void GatherLowering::Fill(const GatherGroup& group) {
  OpDraft fill{.role = Role::kFillSecondary, .stream = StreamId::kGather};
  for (int i : group.intervals) {
    const ResidencyInterval& interval = in_.residency.intervals[i];
    if (!interval.fills_secondary) continue;
    const UnitLayout& unit = in_.plan.layout.units[interval.unit];
    fill.parts.push_back({.unit = interval.unit, .scope = interval.first});
    fill.bytes += 2 * (d_.SecondaryShard(unit.trainable) + d_.SecondaryShard(unit.frozen)) *
                  SizeOf(d_.compute_of(interval.unit));
    AddSecondary(interval.unit, /*fills=*/true);
  }
  if (!fill.parts.empty()) writer_.Issue(fill);
}

// With `fills`: copies this rank's part of a gathered unit into its secondary shard. Without:
// gathers the unit from the secondary shards of a group of ranks.
void GatherLowering::AddSecondary(int unit, bool fills) {
  const DType dtype = d_.compute_of(unit);
  for (const bool trainable : {true, false}) {
    const Section& section = SectionOf(in_.plan, unit, trainable);
    const int64_t count = d_.SecondaryShard(section);
    if (count == 0) continue;
    const Place secondary = table_.PlaceOf(table_.Find(Purpose::kSecondary, unit, trainable));
    Place whole = table_.PlaceOf(WholeRow(table_, unit, trainable));
    if (fills) {
      whole.per_slice = count * SizeOf(dtype);
      whole.of_secondary = true;
      to_.Add(whole, dtype, Access::kRead, count);
      to_.Add(secondary, dtype, Access::kWrite, count);
    } else {
      to_.Add(secondary, dtype, Access::kRead, count);
      to_.Add(whole, dtype, Access::kWrite, section.elements);
    }
  }
}

void GatherLowering::Refresh(const std::vector<int>& units) {
  OpDraft refresh{.role = Role::kRefresh, .stream = StreamId::kGather};
  for (int unit : units) {
    const Section& section = SectionOf(in_.plan, unit, true);
    refresh.parts.push_back({.unit = unit});
    const DType dtype = d_.compute_of(unit);
    refresh.bytes += d_.RingBytes(section.shard, dtype);
    const int parameter = table_.Find(Purpose::kParameter, unit);
    to_.Add(table_.OwnSlice(parameter), dtype, Access::kRead, section.shard);
    to_.Add(table_.PlaceOf(parameter), dtype, Access::kWrite, section.elements);
  }
  writer_.Issue(refresh);
}

}  // namespace ebb::sharding
