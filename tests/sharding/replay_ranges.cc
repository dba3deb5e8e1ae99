// Where everything that a replay touches lies.
#include <algorithm>

#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/passes/pool.h"
#include "ebb/sharding/passes/reduction.h"
#include "replay.h"

namespace ebb::sharding {
namespace {

int64_t Aligned(int64_t bytes) {
  return (bytes + kPoolAlignment - 1) / kPoolAlignment * kPoolAlignment;
}

}  // namespace

int64_t Replay::owned(int unit) const {
  return plan_->decisions.stage == 0 ? trainable(unit).elements : trainable(unit).shard;
}

int Replay::expected_contributions(int unit) const {
  const Decisions& d = plan_->decisions;
  int visits = 0;
  const std::vector<Visit>& forward = inputs_.model->forward;
  for (size_t v = 0; v < forward.size(); ++v) {
    const bool comes =
        inputs_.model->order.empty()
            ? forward[v].backward
            : std::any_of(inputs_.model->order.begin(), inputs_.model->order.end(),
                          [&](const ScopeEvent& event) {
                            return event.backward && event.visit == static_cast<int>(v);
                          });
    visits += static_cast<int>(forward[v].unit) == unit && comes && forward[v].gradients;
  }
  return visits * (inputs_.config->reduces_at_round() ? d.rounds : 1) + (sums_tensor(unit) ? 1 : 0);
}

Range Replay::RangeOfRow(int row, bool slice) const {
  if (row < 0) return {};
  const int64_t bytes = table()[row].bytes();
  const Range whole = RangeOf(table().PlaceOf(row), bytes);
  return slice ? OwnSliceOf(whole) : whole;
}

Range Replay::OwnParameters(int unit) const {
  const Decisions& d = plan_->decisions;
  return RangeOfRow(table().Find(Purpose::kParameter, unit), d.stage > 0 && d.kept_whole[unit]);
}

Range Replay::Gathered(int unit) const {
  return RangeOfRow(table().Find(Purpose::kGathered, unit));
}

Range Replay::GatheredFrozen(int unit) const {
  return RangeOfRow(table().Find(Purpose::kGathered, unit, /*trainable=*/false));
}

Replay::SecondaryRange Replay::Secondary(int unit, bool is_trainable) const {
  const int ranks = static_cast<int>(inputs_.config->zero.hpz_partition_size);
  const Section& section = is_trainable ? trainable(unit) : frozen(unit);
  const int64_t bytes = section.elements * SizeOf(plan_->decisions.compute_of(unit)) / ranks;
  return {.shard = RangeOfRow(table().Find(Purpose::kSecondary, unit, is_trainable)),
          .first = rank_ % ranks * bytes};
}

int64_t Replay::SliceBytes(int unit, bool is_trainable) const {
  const Section& section = is_trainable ? trainable(unit) : frozen(unit);
  return section.shard * SizeOf(plan_->decisions.compute_of(unit));
}

Range Replay::OwnSlice(int unit, bool is_trainable) const {
  if (plan_->decisions.parameter_tier != Tier::kDevice)
    return OwnSliceOf(is_trainable ? Gathered(unit) : GatheredFrozen(unit));
  return RangeOfRow(table().Find(Purpose::kParameter, unit, is_trainable));
}

Range Replay::RangeOf(const Place& place, int64_t bytes) const {
  const bool is_state = place.tier == Tier::kNvme && place.pool != StateClass::kParameter;
  return {is_state ? StateClass::kMaster : place.pool, place.offset + rank_ * place.per_slice,
          bytes, place.tier};
}

// The part that this rank updates of a unit, from an element on.
Content Replay::ParameterOf(int unit, int version, int64_t first_element) const {
  Content content{Content::kParameter, unit, version};
  content.first = first_element * SizeOf(plan_->decisions.compute_of(unit));
  if (plan_->decisions.stage > 0) content.first += rank_ * SliceBytes(unit, /*is_trainable=*/true);
  return content;
}

Content Replay::OwnParametersOf(int unit, int version) const {
  return ParameterOf(unit, version, 0);
}

Content Replay::FrozenOf(int unit) const {
  return {Content::kFrozen, unit, 0, 0, rank_ * SliceBytes(unit, /*is_trainable=*/false)};
}

Range Replay::GradientShard(int unit, bool whole) const {
  return RangeOfRow(table().Find(Purpose::kGradientShard, unit),
                    !whole && plan_->decisions.stage == 0);
}

Range Replay::WholeGradient(int scope) const {
  return RangeOfRow(
      table().Find(Purpose::kGradient, GradientKey(plan_->decisions, plan_->scopes[scope])));
}

bool Replay::IsShard(int scope) const {
  const PlannedScope& s = plan_->scopes[scope];
  if (!s.gradients) return false;
  const Range whole = WholeGradient(scope), shard = GradientShard(s.unit, /*whole=*/true);
  return whole.begin == shard.begin && whole.tier == shard.tier;
}

Range Replay::ScratchRange(Purpose purpose, int64_t at, int64_t bytes) const {
  return RangeOf(table().PlaceOf(table().Find(purpose)).Plus(at), bytes);
}

Range Replay::Reduced(const Op& operation, size_t part) const {
  const int unit = operation.parts[part].unit;
  if (!casts(unit)) return WholeGradient(operation.parts[part].scope);
  const int64_t size = SizeOf(plan_->decisions.reduced(unit));
  int64_t start = 0;
  for (size_t i = 0; i < part; ++i)
    start += Aligned(trainable(operation.parts[i].unit).elements * size);
  return ScratchRange(Purpose::kSentGradient, start, trainable(unit).elements * size);
}

Range Replay::Summed(const Op& operation, size_t part) const {
  const int unit = operation.parts[part].unit;
  if (!rounds(unit) && !IsAdded(operation.parts[part]) && GradientTier(unit) == Tier::kDevice)
    return GradientShard(unit, /*whole=*/false);
  return OwnSliceOf(Reduced(operation, part));
}

Range Replay::ReducedSlice(const Op& operation, size_t part) const {
  const int unit = operation.parts[part].unit;
  if (!rounds(unit)) return OwnSliceOf(Reduced(operation, part));
  const int64_t size = SizeOf(plan_->decisions.communication_of(unit));
  int64_t start = 0;
  for (size_t i = 0; i < part; ++i)
    start += Aligned(trainable(operation.parts[i].unit).shard * size);
  return ScratchRange(Purpose::kRoundedSlice, start, trainable(unit).shard * size);
}

// The parts with shards that are kept below the device and summed there, end to end.
Range Replay::LandedSlice(const Op& reduction, size_t part) const {
  const int64_t size = SizeOf(plan_->decisions.communication_of(reduction.parts[part].unit));
  int64_t start = 0;
  for (size_t i :
       PartsThat(reduction, /*are_added=*/true, GradientTier(reduction.parts[part].unit))) {
    if (i < part) start += Aligned(trainable(reduction.parts[i].unit).shard * size);
  }
  return ScratchRange(Purpose::kLanding, start, trainable(reduction.parts[part].unit).shard * size);
}

const Op* Replay::ReductionOf(const Op& operation) const {
  for (const Op* before = &operation - 1; before >= list_->ops.data(); --before) {
    switch (before->role) {
      case Role::kReduce:
        return before;
      case Role::kAllReduce:
      case Role::kRound:
      case Role::kAccumulate:
      case Role::kSumTensor:
      case Role::kNorm:
      case Role::kDownload:
      case Role::kRead:  // of a shard that is summed in a slot
      case Role::kWrite:
        continue;
      default:
        return nullptr;
    }
  }
  return nullptr;
}

// Shards on NVMe are summed one at a time, in a slot: of those only what `op` is of.
std::vector<size_t> Replay::PartsThat(const Op& reduction, bool are_added, Tier tier,
                                      const Op& operation) const {
  std::vector<size_t> parts = PartsThat(reduction, are_added, tier);
  if (tier != Tier::kNvme) return parts;
  std::erase_if(
      parts, [&](size_t i) { return reduction.parts[i].scope != operation.parts.front().scope; });
  return parts;
}

// Where a reduced shard is while it is summed.
Range Replay::SummedShard(const Op& operation, const Part& part) const {
  if (GradientTier(part.unit) != Tier::kNvme) return GradientShard(part.unit, /*whole=*/false);
  const int64_t size = SizeOf(plan_->decisions.shard_dtype(part.unit));
  // Behind the slice that is added to it.
  const Operand& shard = operation.operands[operation.role == Role::kAccumulate ? 1 : 0];
  return RangeOf(shard.place, trainable(part.unit).shard * size);
}

// The first contribution is the shard, if it comes in the shard's dtype.
bool Replay::IsAdded(const Part& part) const {
  const Decisions& d = plan_->decisions;
  return d.accumulates[part.unit] &&
         !(part.first && d.communication_of(part.unit) == d.shard_dtype(part.unit));
}

std::vector<size_t> Replay::PartsThat(const Op& reduction, bool are_added, Tier tier) const {
  std::vector<size_t> parts;
  for (size_t i = 0; i < reduction.parts.size(); ++i) {
    if (IsAdded(reduction.parts[i]) == are_added && GradientTier(reduction.parts[i].unit) == tier)
      parts.push_back(i);
  }
  return parts;
}

Range Replay::OwnSliceOf(const Range& whole) const {
  const int64_t bytes = whole.bytes / plan_->decisions.shards;
  return {whole.pool, whole.begin + rank_ * bytes, bytes};
}

// Eight bytes for each 1,024 elements of the longest shard.
Range Replay::NormScratch(Tier tier) const {
  int64_t longest = 0;
  for (const UnitLayout& unit : plan_->layout.units)
    longest = std::max(longest, unit.trainable.shard);
  const int row = table().OnTier(Purpose::kNormScratch, /*on_host=*/tier != Tier::kDevice);
  return RangeOf(table().PlaceOf(row), (longest + 1023) / 1024 * 8);
}

// 304 bytes for each parameter that this rank may have a part of, and each group of options.
Range Replay::NormSums(bool on_host) const {
  const int64_t bytes = LayOutNormRecords(plan_->layout, plan_->decisions).sums * 304;
  return RangeOf(table().PlaceOf(table().OnTier(Purpose::kNormSums, on_host)), bytes);
}

Range Replay::Control(int64_t cell, int step) const {
  return {kControlBytes, cells().by_parity(cell) ? cell + step % 2 : cell, 1, Tier::kCpu};
}

Range Replay::Output(int visit, int64_t micro_batch, bool gradient) const {
  const int row = table().Find(gradient ? Purpose::kOutputGradient : Purpose::kOutput, visit);
  return RangeOf(table().TurnOf(row, micro_batch), inputs_.model->forward[visit].output_bytes);
}

Content Replay::GradientOf(Content::Kind kind, int scope) const {
  const PlannedScope& s = plan_->scopes[scope];
  return {kind, s.visit, steps_, s.round};
}

}  // namespace ebb::sharding
