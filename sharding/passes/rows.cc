#include "ebb/sharding/passes/rows.h"

namespace ebb::sharding {

Table RowsOf(const RowInputs& inputs) {
  const Decisions& d = *inputs.decisions;
  Table table;
  table.units = static_cast<int>(inputs.layout->units.size());
  table.visits = static_cast<int>(inputs.model->forward.size());
  table.states = d.optimizer_states;
  table.slices = d.shards;
  table.secondary_slices = d.secondary_shards;
  table.updates_whole = d.stage == 0;
  const size_t units = inputs.layout->units.size(), visits = inputs.model->forward.size(),
               states = static_cast<size_t>(d.optimizer_states);
  table.rows.reserve((8 + states) * units + 4 * visits + 2 * kPurposes);
  table.extents.reserve(table.rows.capacity() + (1 + states) * inputs.placement->sub_groups.size());
  AddStateRows(inputs, table);
  AddSharedRows(inputs, table);
  AddStagingRows(inputs, table);
  return table;
}

}  // namespace ebb::sharding
