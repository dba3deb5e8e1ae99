#include "ebb/sharding/lower/lower_records.h"

#include <algorithm>
#include <cassert>
#include <iterator>

#include "ebb/sharding/norm_records.h"

namespace ebb::sharding {
namespace {

void Issue(OpWriter& writer, Role role, int64_t bytes = 0) {
  writer.Issue({.role = role, .stream = StreamId::kReduce, .bytes = bytes});
}

struct Records {
  Role gather{};
  int ranks = 1;
  int64_t bytes = 0;         // of one
  int64_t more = 0;          // of one, which all ranks' have behind all of these
  int64_t own = 0, all = 0;  // cells
  Place all_records = {};    // on the device: of all ranks, then this rank's own
};

void Gather(const Records& records, OpWriter& writer) {
  OperandWriter& to = writer.operands();
  const int64_t of_one = records.bytes + records.more, of_all = records.ranks * of_one;
  const Place &all = records.all_records, own = all.Plus(of_all);
  to.AddControl(records.own, Access::kRead);
  to.AddBytes(own, Access::kWrite, of_one);
  Issue(writer, Role::kCopyControl);
  to.AddBytes(own, Access::kRead, records.bytes);
  to.AddBytes(all, Access::kWrite, records.ranks * records.bytes);
  if (records.more > 0) {
    to.AddBytes(own.Plus(records.bytes), Access::kRead, records.more);
    to.AddBytes(all.Plus(records.ranks * records.bytes), Access::kWrite,
                records.ranks * records.more);
  }
  Issue(writer, records.gather, of_all - of_one);
  to.AddBytes(all, Access::kRead, of_all);
  to.AddControl(records.all, Access::kWrite);
  Issue(writer, Role::kCopyControl);
}

void CopyConstants(OpWriter& writer) {
  OperandWriter& to = writer.operands();
  to.AddControl(to.cells().constants(), Access::kRead);
  to.AddControl(to.cells().device_constants(), Access::kWrite);
  Issue(writer, Role::kCopyControl);
}

// Where updates come behind the verdict, shards are still as they were when their squares were
// summed. Shards on NVMe are not read for a name.
void AddShards(const Plan& plan, OperandWriter& to) {
  assert(std::ssize(to.operands()) == kSealShards);
  const Decisions& d = plan.decisions;
  if (to.is_walk() || d.timing == UpdateTiming::kEarly) return;
  for (int unit = 0; unit < plan.table.units; ++unit) {
    const int shard = plan.table.Find(Purpose::kGradientShard, unit);
    const bool on_disk = plan.table.TierOf(shard) == Tier::kNvme;
    to.Add(plan.table.OwnSlice(shard), d.shard_dtype(unit), on_disk ? Access::kNone : Access::kRead,
           SectionOf(plan, unit, /*trainable=*/true).shard);
  }
}

}  // namespace

void PrepareConstants(OpWriter& writer) {
  OperandWriter& to = writer.operands();
  const ControlCells& cells = to.cells();
  to.AddControl(cells.early(), Access::kWrite);
  to.AddControl(cells.scale, Access::kRead);
  writer.Issue({.role = Role::kPrepare, .stream = StreamId::kReduce, .shown = false});
  to.AddControl(cells.early(), Access::kRead);
  to.AddControl(cells.device_early(), Access::kWrite);
  writer.Issue({.role = Role::kCopyControl, .stream = StreamId::kReduce, .shown = false});
}

void ExchangeRecords(const Plan& plan, OpWriter& writer) {
  OperandWriter& to = writer.operands();
  const ControlCells& cells = to.cells();
  const auto of_step = [&](Access access) { return to.is_walk() ? Access::kNone : access; };
  to.AddControl(to.record(), Access::kWrite);
  to.AddControl(cells.squares, of_step(Access::kRead),
                static_cast<int64_t>(plan.layout.units.size()));
  to.AddControl(to.sums(), Access::kReadWrite);
  AddShards(plan, to);
  Issue(writer, Role::kSeal);
  Gather({.gather = Role::kExchange,
          .ranks = plan.decisions.verdict_ranks,
          .bytes = kExchangeBytes,
          .more = RecordBytes(plan.decisions) - kExchangeBytes,
          .own = to.record(),
          .all = to.records(),
          .all_records = plan.table.PlaceOf(plan.table.Find(Purpose::kRecords))},
         writer);
  to.AddControl(to.records(), Access::kRead);
  to.AddControl(cells.constants(), of_step(Access::kWrite));
  to.AddControl(cells.scale, of_step(Access::kReadWrite));
  Issue(writer, Role::kConclude);
  if (!to.is_walk()) CopyConstants(writer);
}

void ExchangeNorms(const Plan& plan, OpWriter& writer) {
  OperandWriter& to = writer.operands();
  const ControlCells& cells = to.cells();
  const NormRecords records = LayOutNormRecords(plan.layout, plan.decisions);
  const auto any = [&](bool on_host) {
    return std::any_of(plan.table.sub_groups.begin(), plan.table.sub_groups.end(),
                       [&](const SubGroup& group) {
                         return (group.tier != Tier::kDevice) == on_host &&
                                plan.decisions.norm_states[static_cast<size_t>(group.unit)] >= 0;
                       });
  };
  const bool on_device = any(false);
  const int64_t bytes = records.sums * kNormSumsBytes;
  if (on_device) {
    to.AddBytes(NormSums(plan, /*on_host=*/false), Access::kRead, bytes);
    to.AddControl(cells.norm_sums(), Access::kWrite);
    Issue(writer, Role::kCopyControl);
  }
  to.AddControl(cells.norm_sums(), on_device ? Access::kRead : Access::kNone);
  to.AddBytes(NormSums(plan, /*on_host=*/true), Access::kRead, any(true) ? bytes : 0);
  to.AddControl(cells.norm_record(), Access::kWrite);
  Issue(writer, Role::kSealNorms);
  if (records.exchanged()) {
    Gather({.gather = Role::kExchangeNorms,
            .ranks = records.ranks,
            .bytes = records.bytes(),
            .own = cells.norm_record(),
            .all = cells.norm_records(),
            .all_records = plan.table.PlaceOf(plan.table.Find(Purpose::kNormRecords))},
           writer);
  }
  to.AddControl(records.exchanged() ? cells.norm_records() : cells.norm_record(), Access::kRead);
  to.AddControl(cells.constants(), Access::kReadWrite);
  Issue(writer, Role::kConcludeNorms);
  CopyConstants(writer);
}

Place NormSums(const Plan& plan, bool on_host) {
  return plan.table.PlaceOf(plan.table.OnTier(Purpose::kNormSums, on_host));
}

}  // namespace ebb::sharding
