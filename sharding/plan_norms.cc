// What optimizers that take norms (LAMB, LARS) need before their updates: each rank sums its part of every
// parameter, sub-group by sub-group, and the ranks exchange the sums. Sub-groups pass through the slots of
// updates, and nothing is written; the updates bring them again.
//
//   read states    s0  s1  s2             s0  s1  s2
//   host update        n0  n1  n2             u0  u1  u2        n: sums, u: update
//   reduce                        exchange
//   write                                         s0  s1  s2
#include <utility>

#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/plan_builder.h"
#include "ebb/sharding/update_chain.h"

namespace ebb::sharding {

int64_t PlanBuilder::NormsBytes(int unit, int64_t elements) const {
  const int64_t states = d_.master_size() + 4 * d_.norm_states[static_cast<size_t>(unit)];
  const int64_t parameter = d_.reads_parameters() ? SizeOf(d_.compute) : 0;
  return elements * (states + SizeOf(d_.shard_dtype(unit)) + parameter);
}

void PlanBuilder::IssueNormsOf(UpdateChain& chain, int index) {
  const SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(index)];
  SubGroupRoute route = RouteOf(chain, group);
  // Read where it is the master or a half of it, and never written.
  route.moves_parameter = route.moves_parameter && d_.reads_parameters();
  TakeSlots(chain, group, route);
  ReadStates(chain, index, d_.norm_states[static_cast<size_t>(chain.unit)], route);
  UpdateWork work = WorkOf(chain, index, route);
  work.writes_parameter = d_.reads_parameters();
  const StreamId stream = route.on_host ? StreamId::kHostUpdate : StreamId::kUpdate;
  IssueOnSubGroup(chain, route, std::move(work),
                  {.kind = OperationKind::kParameterNorms,
                   .stream = stream,
                   .parts = {{.unit = chain.unit, .first = !norms_begun_[route.on_host ? 1 : 0]}},
                   .bytes = NormsBytes(chain.unit, group.count())});
  norms_begun_[route.on_host ? 1 : 0] = true;
}

void PlanBuilder::IssueParameterNorms() {
  if (!d_.has_norms()) return;
  std::vector<bool> seen(plan_.layout.units.size(), false);
  for (const Visit& visit : inputs_.model->forward) {
    const auto unit = static_cast<size_t>(visit.unit);
    if (seen[unit] || !d_.trainable[unit] || d_.norm_states[unit] < 0) continue;
    seen[unit] = true;
    UpdateChain chain{.unit = static_cast<int>(unit)};
    const UnitHomes& homes = plan_.pools.homes.units[unit];
    for (int g = 0; g < homes.sub_groups; ++g) IssueNormsOf(chain, homes.first_sub_group + g);
  }
  const NormRecords records = LayOutNormRecords(plan_.layout, d_);
  Issue({.kind = OperationKind::kExchangeNorms,
         .stream = StreamId::kReduce,
         .parts = {},
         .bytes = records.exchanged ? (d_.shards - 1) * records.bytes() : 0});
}

}  // namespace ebb::sharding
