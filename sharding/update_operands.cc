// What updates touch, and what comes before them: norms of parameters, and what ranks tell each other.
#include <algorithm>

#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/operands.h"
#include "ebb/sharding/unit_places.h"

namespace ebb::sharding {
namespace {

// gradient, master, parameter, states.
void AddArrays(const UpdateWork& work, Access access, int states, OperandWriter& to) {
  const Decisions& d = to.plan().decisions;
  const int64_t count =
      to.plan().pools.homes.sub_groups[static_cast<size_t>(work.sub_group)].count();
  to.Add(work.gradient, d.shard_dtype(work.unit), Access::kRead, count);
  // Low halves count as 16 bits, whatever they mean; where parameters alone are kept, there is nothing.
  to.Add(work.master, d.split_master ? DType::kBFloat16 : DType::kFloat32, access,
         d.stochastic_rounding ? 0 : count);
  const Access of_parameter = !Writes(access)        ? Access::kRead
                              : d.reads_parameters() ? Access::kReadWrite
                                                     : Access::kWrite;
  to.Add(work.parameter, d.compute, of_parameter, work.writes_parameter ? count : 0);
  for (int k = 0; k < states; ++k)
    to.Add(work.states.Plus(k * work.states_stride), DType::kFloat32, access, count);
}

bool IsEarly(const Operation& operation, const Decisions& d) {
  return operation.kind == OperationKind::kUpdate && d.timing == UpdateTiming::kEarly &&
         operation.condition != Condition::kCarrying;
}

void AddUpdate(const Operation& operation, const UpdateWork& work, OperandWriter& to) {
  const Plan& plan = to.plan();
  const Decisions& d = plan.decisions;
  AddArrays(work, Access::kReadWrite, d.optimizer_states, to);
  to.AddControl(IsEarly(operation, d) ? to.cells().early() : to.cells().constants(), Access::kRead);
  if (!d.own_optimizer) return;
  const SubGroup& group = plan.pools.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  const bool on_host = group.tier != Tier::kDevice;
  int64_t longest = 0;  // part of a parameter
  for (const Placement& placement : SectionOf(plan, work.unit, true).placements)
    longest = std::max(longest, std::min(placement.elements, group.count()));
  to.Add(on_host ? plan.pools.host_gradient : StagingPlace(plan.pools.staging_gradient),
         DType::kFloat32, Access::kWrite, longest);
  if (!d.reads_parameters()) return;
  to.Add(on_host ? plan.pools.host_master : StagingPlace(plan.pools.staging_master),
         DType::kFloat32, Access::kWrite, longest);
}

Place NormSums(const Pools& pools, bool on_host) {
  return on_host ? pools.host_norm_sums : StagingPlace(pools.staging_norm_sums);
}

void AddParameterNorms(const Operation& operation, const Part& part, const UpdateWork& work,
                       OperandWriter& to) {
  const Plan& plan = to.plan();
  AddArrays(work, Access::kRead, plan.decisions.norm_states[static_cast<size_t>(work.unit)], to);
  to.AddBytes(NormSums(plan.pools, operation.stream == StreamId::kHostUpdate),
              part.first ? Access::kWrite : Access::kReadWrite,
              LayOutNormRecords(plan.layout, plan.decisions).sums * kNormSumsBytes);
  to.AddControl(to.cells().constants(), Access::kRead);
}

}  // namespace

void AddUpdateOperands(const Operation& operation, OperandWriter& to) {
  for (const Part& part : operation.parts) {
    const UpdateWork& work = to.plan().works[static_cast<size_t>(part.work)];
    if (operation.kind == OperationKind::kUpdate) {
      AddUpdate(operation, work, to);
    } else {
      AddParameterNorms(operation, part, work, to);
    }
  }
}

std::vector<UpdateDetail> UpdateDetailsOf(const Plan& plan, const Operation& operation) {
  const Decisions& d = plan.decisions;
  std::vector<UpdateDetail> details;
  for (const Part& part : operation.parts) {
    const auto work = static_cast<size_t>(part.work), unit = static_cast<size_t>(part.unit);
    const bool norms = operation.kind == OperationKind::kParameterNorms;
    if (operation.kind == OperationKind::kNarrow) {
      details.push_back({.sub_group = plan.narrowings[work].sub_group});
    } else if (norms || operation.kind == OperationKind::kUpdate) {
      const UpdateWork& of = plan.works[work];
      const SubGroup& group = plan.pools.homes.sub_groups[static_cast<size_t>(of.sub_group)];
      details.push_back({.sub_group = of.sub_group,
                         .begin = group.begin,
                         .end = group.end,
                         .states = norms ? d.norm_states[unit] : d.optimizer_states,
                         .early = IsEarly(operation, d),
                         .keeps_parameter = of.passes_slot && !d.reads_parameters(),
                         .first = group.begin,
                         .per_slice = d.stage == 0 ? 0 : SectionOf(plan, of.unit, true).shard,
                         .rounding_unit = Hasher().Add(plan.unit_names[unit]).hash()});
    }
  }
  return details;
}

void AddExchangeOperands(OperandWriter& to) {
  const Plan& plan = to.plan();
  const ControlCells& cells = to.cells();
  to.AddBytes(StagingPlace(plan.pools.staging_exchange), Access::kWrite,
              (plan.decisions.world + 1) * kExchangeBytes);
  const auto of_step = [&](Access access) { return to.is_walk() ? Access::kNone : access; };
  to.AddControl(cells.squares, of_step(Access::kRead),
                static_cast<int64_t>(plan.layout.units.size()));
  to.AddControl(to.sums(), Access::kReadWrite);
  to.AddControl(to.files(), Access::kRead);
  to.AddControl(cells.constants(), of_step(Access::kWrite));
  to.AddControl(cells.scale, of_step(Access::kReadWrite));
}

void AddNormExchangeOperands(OperandWriter& to) {
  const Plan& plan = to.plan();
  const Decisions& d = plan.decisions;
  const NormRecords records = LayOutNormRecords(plan.layout, d);
  for (const bool on_host : {false, true}) {
    const auto& groups = plan.pools.homes.sub_groups;
    const bool any = std::any_of(groups.begin(), groups.end(), [&](const SubGroup& group) {
      return (group.tier != Tier::kDevice) == on_host &&
             d.norm_states[static_cast<size_t>(group.unit)] >= 0;
    });
    to.AddBytes(NormSums(plan.pools, on_host), Access::kRead,
                any ? records.sums * kNormSumsBytes : 0);
  }
  to.AddBytes(StagingPlace(plan.pools.staging_norm_records), Access::kWrite,
              records.exchanged ? (d.shards + 1) * records.bytes() : 0);
  to.AddControl(to.cells().constants(), Access::kReadWrite);
}

}  // namespace ebb::sharding
