#include "ebb/sharding/lower/lower_gathers.h"

#include "ebb/sharding/program/table.h"

namespace ebb::sharding {

void AddGather(const Table& table, int unit, std::vector<Operand>& operands) {
  for (const bool trainable : {true, false}) {
    const int from = GatheredFrom(table, unit, trainable), to = WholeRow(table, unit, trainable);
    const Array& whole = table[to];
    if (whole.elements == 0) continue;
    operands.push_back({.place = table.OwnSlice(from),
                        .dtype = whole.dtype,
                        .access = Access::kRead,
                        .count = whole.elements / table.slices});
    operands.push_back({.place = table.PlaceOf(to),
                        .dtype = whole.dtype,
                        .access = Access::kWrite,
                        .count = whole.elements});
  }
}

void GatherLowering::Read(int swap_in) {
  const SwapIn& read = swap_ins_.reads[static_cast<size_t>(swap_in)];
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
  return table_.TurnOf(table_.Find(Purpose::kMasterSlot),
                       swap_ins_.master_slot[static_cast<size_t>(sub_group)]);
}

void GatherLowering::ReadMasters(const SwapIn& swap_in) {
  OperationDraft read{.kind = OperationKind::kRead, .stream = StreamId::kReadParameters};
  for (int unit : swap_in.shared) {
    if (d_.reads_parameters(unit)) continue;
    read.parts.push_back({.unit = unit});
    for (int g : SharedSubGroups(unit)) {
      const SubGroup& group = table_.sub_groups[static_cast<size_t>(g)];
      const int64_t bytes = SwapAligned(group.count() * d_.master_size(unit));
      read.moves.push_back(
          {.state = StateClass::kMaster,
           .from = table_.PlaceOf(table_.Find(Purpose::kMaster, unit), group.begin),
           .to = MasterSlotOf(g),
           .bytes = bytes});
      read.bytes += bytes;
    }
  }
  writer_.Issue(read);
}

// On the stream of the reads, where their ends are.
void GatherLowering::CastMasters(const SwapIn& swap_in) {
  OperationDraft cast{.kind = OperationKind::kCastMasters, .stream = StreamId::kReadParameters};
  for (int unit : swap_in.shared) {
    for (int g : SharedSubGroups(unit)) {
      const SubGroup& group = table_.sub_groups[static_cast<size_t>(g)];
      cast.parts.push_back({.unit = unit});
      cast.updates.push_back({.sub_group = g});
      writer_.operands().Add(MasterSlotOf(g), DType::kFloat32, Access::kRead, group.count());
      writer_.operands().Add(InSlot(in_.plan, swap_in, unit, true, group.begin),
                             d_.compute_of(unit), Access::kWrite, group.count());
      cast.bytes += group.count() * (d_.master_size(unit) + SizeOf(d_.compute_of(unit)));
    }
  }
  writer_.Issue(cast);
}

void GatherLowering::ReadParameters(int swap_in, bool carried) {
  const SwapIn& of = swap_ins_.reads[static_cast<size_t>(swap_in)];
  OperationDraft read{.kind = OperationKind::kRead,
                      .stream = StreamId::kReadParameters,
                      .condition = carried ? Condition::kNotCarrying : Condition::kAlways};
  for (int unit : of.units) {
    const int64_t size = SizeOf(d_.compute_of(unit));
    const bool is_updated =
        std::find(of.updated.begin(), of.updated.end(), unit) != of.updated.end();
    const size_t moves = read.moves.size();
    for (const bool trainable : {true, false}) {
      if (carried != (is_updated && trainable)) continue;
      const int row = table_.Find(Purpose::kParameter, unit, trainable);
      for (const Extent& piece : table_.ExtentsOf(row)) {
        if (piece.place.tier != Tier::kNvme) continue;
        for (const auto& [begin, end] : NotCast(swap_in, unit, trainable, piece)) {
          const int64_t bytes = SwapAligned((end - begin) * size);
          read.moves.push_back({.state = StateClass::kParameter,
                                .from = piece.place.Plus((begin - piece.begin) * size),
                                .to = InSlot(in_.plan, of, unit, trainable, begin),
                                .bytes = bytes});
          read.bytes += bytes;
        }
      }
    }
    if (read.moves.size() > moves) read.parts.push_back({.unit = unit});
  }
  if (read.moves.empty()) return;
  writer_.Issue(read);
}

// The part of a piece that a read brings: all but sub-groups with masters that are read instead.
GatherLowering::Ranges GatherLowering::NotCast(int swap_in, int unit, bool trainable,
                                               const Extent& piece) const {
  const bool casts = trainable && !d_.reads_parameters(unit) &&
                     !swap_ins_.carried[static_cast<size_t>(unit)] &&
                     swap_ins_.of_update[static_cast<size_t>(unit)] == swap_in;
  if (!casts) return {{piece.begin, piece.end}};
  Ranges ranges;
  for (const int g : table_.SubGroupNumbersOf(unit)) {
    const SubGroup& group = table_.sub_groups[static_cast<size_t>(g)];
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
  OperationDraft upload{.kind = OperationKind::kUpload, .stream = StreamId::kUpload};
  const int swap_in = swap_ins_.of_group[static_cast<size_t>(index)];
  for (int i : in_.residency.groups[static_cast<size_t>(index)].intervals) {
    const int unit = in_.residency.intervals[static_cast<size_t>(i)].unit;
    const int64_t size = SizeOf(d_.compute_of(unit));
    const size_t moves = upload.moves.size();
    for (const bool trainable : {true, false}) {
      const int to = GatheredFrom(table_, unit, trainable);
      for (const Extent& piece :
           table_.ExtentsOf(table_.Find(Purpose::kParameter, unit, trainable))) {
        if (piece.place.tier == Tier::kDevice) continue;
        upload.moves.push_back(
            {.state = StateClass::kParameter,
             .from = piece.place.tier == Tier::kCpu
                         ? piece.place
                         : InSlot(in_.plan, swap_ins_.reads[static_cast<size_t>(swap_in)], unit,
                                  trainable, piece.begin),
             .to = table_.OwnSlice(to, piece.begin),
             .bytes = piece.count() * size});
        upload.bytes += piece.count() * size;
      }
    }
    if (upload.moves.size() > moves) upload.parts.push_back({.unit = unit});
  }
  if (!upload.moves.empty()) writer_.Issue(upload);
}

void GatherLowering::Gather(int index) {
  const GatherGroup& group = in_.residency.groups[static_cast<size_t>(index)];
  OperationDraft gather{
      .kind = group.from_secondary ? OperationKind::kGatherSecondary : OperationKind::kGather,
      .stream = StreamId::kGather};
  for (int i : group.intervals) {
    const ResidencyInterval& interval = in_.residency.intervals[static_cast<size_t>(i)];
    const UnitLayout& unit = in_.plan.layout.units[static_cast<size_t>(interval.unit)];
    const DType dtype = d_.compute_of(interval.unit);
    gather.parts.push_back({.unit = interval.unit, .scope = interval.first});
    if (group.from_secondary) {
      const int64_t part = d_.SecondaryShard(unit.trainable) + d_.SecondaryShard(unit.frozen);
      gather.bytes += (d_.secondary_shards - 1) * part * SizeOf(dtype);
      AddSecondary(interval.unit, /*fills=*/false);
    } else {
      gather.bytes += d_.RingBytes(unit.shard(), dtype);
      AddGather(table_, interval.unit, writer_.operands().operands());
    }
  }
  const int gathered = writer_.Issue(gather);
  for (int i : group.intervals) {
    const ResidencyInterval& interval = in_.residency.intervals[static_cast<size_t>(i)];
    for (int s = interval.first; s <= interval.last; ++s)
      if (in_.plan.scopes[static_cast<size_t>(s)].unit == interval.unit)
        writer_.Gathers(s, gathered);
  }
  Fill(group);
}

void GatherLowering::Fill(const GatherGroup& group) {
  OperationDraft fill{.kind = OperationKind::kFillSecondary, .stream = StreamId::kGather};
  for (int i : group.intervals) {
    const ResidencyInterval& interval = in_.residency.intervals[static_cast<size_t>(i)];
    if (!interval.fills_secondary) continue;
    const UnitLayout& unit = in_.plan.layout.units[static_cast<size_t>(interval.unit)];
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
      writer_.operands().Add(whole, dtype, Access::kRead, count);
      writer_.operands().Add(secondary, dtype, Access::kWrite, count);
    } else {
      writer_.operands().Add(secondary, dtype, Access::kRead, count);
      writer_.operands().Add(whole, dtype, Access::kWrite, section.elements);
    }
  }
}

void GatherLowering::Refresh(const std::vector<int>& units) {
  OperationDraft refresh{.kind = OperationKind::kRefresh, .stream = StreamId::kGather};
  for (int unit : units) {
    const Section& section = SectionOf(in_.plan, unit, true);
    refresh.parts.push_back({.unit = unit});
    const DType dtype = d_.compute_of(unit);
    refresh.bytes += d_.RingBytes(section.shard, dtype);
    const int parameter = table_.Find(Purpose::kParameter, unit);
    writer_.operands().Add(table_.OwnSlice(parameter), dtype, Access::kRead, section.shard);
    writer_.operands().Add(table_.PlaceOf(parameter), dtype, Access::kWrite, section.elements);
  }
  writer_.Issue(refresh);
}

}  // namespace ebb::sharding
