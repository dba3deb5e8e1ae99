// Rows of what stays from step to step: parameters, masters and optimizer states.
#include "ebb/sharding/passes/rows.h"

namespace ebb::sharding {
namespace {

void AddParameters(const RowInputs& in, Table& table) {
  const Decisions& d = *in.decisions;
  for (int unit = 0; unit < table.units; ++unit) {
    const UnitLayout& layout = in.layout->units[unit];
    const UnitPlacement& placement = in.placement->units[unit];
    const bool whole = d.kept_whole[unit];
    for (const bool trainable : {true, false}) {
      const Section& section = trainable ? layout.trainable : layout.frozen;
      const int64_t elements = whole ? section.elements : section.shard;
      table.Add({.purpose = Purpose::kParameter,
                 .of = unit,
                 .trainable = trainable,
                 .encoding = d.compute_of(unit),
                 .spread = whole ? Spread::kWhole : Spread::kSlice,
                 .elements = elements});
      if (whole && elements > 0) table.AddExtent({.begin = 0, .end = elements});
      if (whole) continue;
      for (const ParameterPiece& piece : placement.pieces(trainable))
        table.AddExtent({.begin = piece.begin, .end = piece.end, .place = {.tier = piece.tier}});
    }
  }
}

// An extent for each sub-group.
void AddUpdated(const Array& row, Table& table) {
  table.Add(row);
  if (row.elements == 0) return;
  for (const SubGroup& group : table.SubGroupsOf(row.of))
    table.AddExtent({.begin = group.begin, .end = group.end, .place = {.tier = group.tier}});
}

}  // namespace

void AddStateRows(const RowInputs& in, Table& table) {
  const Decisions& d = *in.decisions;
  table.sub_groups = in.placement->sub_groups;
  for (const UnitPlacement& unit : in.placement->units)
    table.first_sub_groups.push_back(unit.first_sub_group);
  table.first_sub_groups.push_back(static_cast<int>(table.sub_groups.size()));
  AddParameters(in, table);
  const auto updated = [&](Purpose purpose, int unit) {
    const Section& section = in.layout->units[unit].trainable;
    return Array{.purpose = purpose,
                 .of = unit,
                 .spread = d.stage == 0 ? Spread::kWhole : Spread::kSlice,
                 .elements = d.stage == 0 ? section.elements : section.shard};
  };
  for (int unit = 0; unit < table.units; ++unit) {
    Array master = updated(Purpose::kMaster, unit);
    master.encoding = d.master_encoding(unit);
    if (!d.keeps_master(unit)) master.elements = 0;
    if (!d.writes_parameters(unit)) {
      master.elements = 0;
      master.same_as = table.Find(Purpose::kParameter, unit);
    }
    AddUpdated(master, table);
  }
  for (int state = 0; state < d.optimizer_states; ++state) {
    for (int unit = 0; unit < table.units; ++unit) {
      Array row = updated(Purpose::kState, unit);
      row.state = state;
      row.encoding = d.state_encoding(unit, state);
      if (state >= d.states_of(unit)) row.elements = 0;
      AddUpdated(row, table);
    }
  }
}

StatePlacement PlacementOf(const Table& table) {
  StatePlacement placement{.units = std::vector<UnitPlacement>(static_cast<size_t>(table.units)),
                           .sub_groups = table.sub_groups};
  for (int unit = 0; unit < table.units; ++unit) {
    UnitPlacement& of = placement.units[unit];
    of.first_sub_group = table.FirstSubGroupOf(unit);
    of.sub_groups = static_cast<int>(table.SubGroupsOf(unit).size());
    of.gradient = table.TierOf(table.Find(Purpose::kGradientShard, unit));
    for (const bool trainable : {true, false}) {
      for (const Extent& own : table.OwnExtents(table.Find(Purpose::kParameter, unit, trainable)))
        (trainable ? of.trainable : of.frozen)
            .push_back({.begin = own.begin, .end = own.end, .tier = own.place.tier});
    }
  }
  return placement;
}

}  // namespace ebb::sharding
