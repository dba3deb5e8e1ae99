#include "ebb/sharding/norm_records.h"

#include <algorithm>

#include "ebb/sharding/interval.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {
namespace {

int EntriesOf(const Section& section, const Decisions& decisions, int slice) {
  int entries = 0;
  for (const Interval& interval : IntervalsOf(section, slice))
    entries += decisions.takes_norms[static_cast<size_t>(interval.parameter)] ? 1 : 0;
  return entries;
}

}  // namespace

NormRecords LayOutNormRecords(const ModelLayout& layout, const Decisions& decisions) {
  NormRecords records;
  if (!decisions.has_norms()) return records;
  if (decisions.has_blocks) records.tensor_ranks = decisions.tensor_ranks();
  if (decisions.stage > 0 || records.tensor_ranks > 1)
    records.ranks = layout.shards * records.tensor_ranks;
  records.sums = decisions.sets_without_norms;
  for (size_t u = 0; u < layout.units.size(); ++u) {
    records.first.push_back(records.entries);
    if (decisions.norm_states[u] < 0) continue;
    const Section& section = layout.units[u].trainable;
    int most = 0;
    if (decisions.stage == 0) {
      for (const PlacedParameter& placement : section.placements)
        most += decisions.takes_norms[static_cast<size_t>(placement.parameter)] ? 1 : 0;
    } else {
      for (int slice = 0; slice < layout.shards; ++slice)
        most = std::max(most, EntriesOf(section, decisions, slice));
    }
    records.entries += most;
  }
  records.sums += records.entries;
  return records;
}

int NormEntryOf(const Section& section, const Decisions& decisions, int slice,
                ParameterId parameter) {
  int entry = 0;
  const std::vector<Interval> all = decisions.stage == 0 ? IntervalsIn(section, 0, section.elements)
                                                         : IntervalsOf(section, slice);
  for (const Interval& interval : all) {
    if (interval.parameter == parameter) return entry;
    entry += decisions.takes_norms[static_cast<size_t>(interval.parameter)] ? 1 : 0;
  }
  return -1;
}

}  // namespace ebb::sharding
