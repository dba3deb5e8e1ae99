#include "ebb/sharding/lower/lower_exchange.h"

#include <algorithm>
#include <cassert>
#include <iterator>

#include "ebb/sharding/instructions.h"
#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/unit_places.h"

namespace ebb::sharding {
namespace {

void Issue(PlanWriter& writer, OperationKind kind, int64_t bytes = 0) {
  writer.Issue({.kind = kind, .stream = StreamId::kReduce, .bytes = bytes});
}

struct Records {
  OperationKind gather{};
  int ranks = 1;
  int64_t bytes = 0;         // of one
  int64_t own = 0, all = 0;  // cells
  int64_t staging = 0;       // on the device: of all ranks, then this rank's own
};

void Gather(const Records& records, PlanWriter& writer) {
  OperandWriter& to = writer.operands();
  const int64_t of_all = records.ranks * records.bytes;
  const Place all = StagingPlace(records.staging), own = all.Plus(of_all);
  to.AddControl(records.own, Access::kRead);
  to.AddBytes(own, Access::kWrite, records.bytes);
  Issue(writer, OperationKind::kCopyControl);
  to.AddBytes(own, Access::kRead, records.bytes);
  to.AddBytes(all, Access::kWrite, of_all);
  Issue(writer, records.gather, of_all - records.bytes);
  to.AddBytes(all, Access::kRead, of_all);
  to.AddControl(records.all, Access::kWrite);
  Issue(writer, OperationKind::kCopyControl);
}

void CopyConstants(PlanWriter& writer) {
  OperandWriter& to = writer.operands();
  to.AddControl(to.cells().constants(), Access::kRead);
  to.AddControl(to.cells().device_constants(), Access::kWrite);
  Issue(writer, OperationKind::kCopyControl);
}

// Where updates come behind the verdict, shards are still as they were when their squares were
// summed. Shards on NVMe are not read for a name.
void AddShards(const Plan& plan, OperandWriter& to) {
  assert(std::ssize(to.operands()) == kSealShards);
  const Decisions& d = plan.decisions;
  if (to.is_walk() || d.timing == UpdateTiming::kEarly) return;
  for (size_t u = 0; u < plan.layout.units.size(); ++u) {
    const int unit = static_cast<int>(u);
    const bool on_disk = plan.pools.placement.units[u].gradient == Tier::kNvme;
    to.Add(GradientSlicePlace(plan, unit), d.shard_dtype(unit),
           on_disk ? Access::kNone : Access::kRead, plan.layout.units[u].trainable.shard);
  }
}

}  // namespace

void ExchangeRecords(const Plan& plan, PlanWriter& writer) {
  OperandWriter& to = writer.operands();
  const ControlCells& cells = to.cells();
  const auto of_step = [&](Access access) { return to.is_walk() ? Access::kNone : access; };
  to.AddControl(to.record(), Access::kWrite);
  to.AddControl(cells.squares, of_step(Access::kRead),
                static_cast<int64_t>(plan.layout.units.size()));
  to.AddControl(to.sums(), Access::kReadWrite);
  AddShards(plan, to);
  Issue(writer, OperationKind::kSeal);
  Gather({.gather = OperationKind::kExchange,
          .ranks = plan.decisions.world,
          .bytes = kExchangeBytes,
          .own = to.record(),
          .all = to.records(),
          .staging = plan.pools.staging_exchange},
         writer);
  to.AddControl(to.records(), Access::kRead);
  to.AddControl(cells.constants(), of_step(Access::kWrite));
  to.AddControl(cells.scale, of_step(Access::kReadWrite));
  Issue(writer, OperationKind::kConclude);
  if (!to.is_walk()) CopyConstants(writer);
}

void ExchangeNorms(const Plan& plan, PlanWriter& writer) {
  OperandWriter& to = writer.operands();
  const ControlCells& cells = to.cells();
  const NormRecords records = LayOutNormRecords(plan.layout, plan.decisions);
  const auto any = [&](bool on_host) {
    return std::any_of(plan.pools.placement.sub_groups.begin(),
                       plan.pools.placement.sub_groups.end(), [&](const SubGroup& group) {
                         return (group.tier != Tier::kDevice) == on_host &&
                                plan.decisions.norm_states[static_cast<size_t>(group.unit)] >= 0;
                       });
  };
  const bool on_device = any(false);
  const int64_t bytes = records.sums * kNormSumsBytes;
  if (on_device) {
    to.AddBytes(NormSums(plan, /*on_host=*/false), Access::kRead, bytes);
    to.AddControl(cells.norm_sums(), Access::kWrite);
    Issue(writer, OperationKind::kCopyControl);
  }
  to.AddControl(cells.norm_sums(), on_device ? Access::kRead : Access::kNone);
  to.AddBytes(NormSums(plan, /*on_host=*/true), Access::kRead, any(true) ? bytes : 0);
  to.AddControl(cells.norm_record(), Access::kWrite);
  Issue(writer, OperationKind::kSealNorms);
  if (records.exchanged) {
    Gather({.gather = OperationKind::kExchangeNorms,
            .ranks = plan.decisions.shards,
            .bytes = records.bytes(),
            .own = cells.norm_record(),
            .all = cells.norm_records(),
            .staging = plan.pools.staging_norm_records},
           writer);
  }
  to.AddControl(records.exchanged ? cells.norm_records() : cells.norm_record(), Access::kRead);
  to.AddControl(cells.constants(), Access::kReadWrite);
  Issue(writer, OperationKind::kConcludeNorms);
  CopyConstants(writer);
}

Place NormSums(const Plan& plan, bool on_host) {
  return on_host ? plan.pools.host_norm_sums : StagingPlace(plan.pools.staging_norm_sums);
}

}  // namespace ebb::sharding
