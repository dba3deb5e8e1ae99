// Where everything that a replay touches lies.
#include <algorithm>

#include "ebb/sharding/pool.h"
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
  for (const Visit& visit : inputs_.model->forward) visits += static_cast<int>(visit.unit) == unit;
  return visits * (inputs_.config->reduces_at_round() ? d.rounds : 1);
}

Range Replay::OwnParameters(int unit) const {
  const Decisions& d = plan_->decisions;
  const int64_t size = SizeOf(d.compute), start = plan_->pools.units[unit].parameter_trainable;
  if (d.stage == 0) return {StateClass::kParameter, start, trainable(unit).elements * size};
  const int64_t shard_bytes = trainable(unit).shard * size;
  return {StateClass::kParameter, start + (d.kept_whole[unit] ? rank_ * shard_bytes : 0),
          shard_bytes};
}

Range Replay::Gathered(int unit) const {
  const UnitAddresses& addresses = plan_->pools.units[unit];
  const int64_t bytes = trainable(unit).elements * SizeOf(plan_->decisions.compute);
  if (plan_->decisions.kept_whole[unit])
    return {StateClass::kParameter, addresses.parameter_trainable, bytes};
  return {StateClass::kGather, addresses.gather_trainable, bytes};
}

Range Replay::GatheredFrozen(int unit) const {
  const UnitAddresses& addresses = plan_->pools.units[unit];
  const int64_t bytes = frozen(unit).elements * SizeOf(plan_->decisions.compute);
  if (plan_->decisions.kept_whole[unit])
    return {StateClass::kParameter, addresses.parameter_frozen, bytes};
  return {StateClass::kGather, addresses.gather_frozen, bytes};
}

const SubGroup& Replay::SubGroupOf(int unit) const {
  static const SubGroup kNothing;
  const Homes& homes = plan_->pools.homes;
  if (homes.units[static_cast<size_t>(unit)].sub_groups == 0) return kNothing;
  return homes
      .sub_groups[static_cast<size_t>(homes.units[static_cast<size_t>(unit)].first_sub_group)];
}

Range Replay::Master(int unit) const {
  return {StateClass::kMaster, SubGroupOf(unit).master.offset, owned(unit) * 4};
}

Range Replay::OptimizerState(int unit, int state) const {
  const SubGroup& group = SubGroupOf(unit);
  return {StateClass::kOptimizer, group.states.offset + state * group.states_stride,
          owned(unit) * 4};
}

Range Replay::GradientShard(int unit, bool whole) const {
  const int64_t start = plan_->pools.units[unit].gradient_shard;
  const int64_t size = SizeOf(plan_->decisions.shard_dtype(unit));
  if (whole) return {StateClass::kGradient, start, trainable(unit).elements * size};
  const int64_t shard_bytes = trainable(unit).shard * size;
  return {StateClass::kGradient, start + (plan_->decisions.stage == 0 ? rank_ * shard_bytes : 0),
          shard_bytes};
}

Range Replay::WholeGradient(int scope) const {
  const PlannedScope& s = plan_->scopes[scope];
  return {StateClass::kGradient, plan_->pools.visits[s.visit].gradient,
          trainable(s.unit).elements * SizeOf(plan_->decisions.gradient)};
}

Range Replay::Reduced(const Operation& operation, size_t part) const {
  if (!casts()) return WholeGradient(operation.parts[part].scope);
  const int64_t size = rounds() ? SizeOf(DType::kFloat32) : SizeOf(plan_->decisions.communication);
  int64_t start = plan_->pools.staging_cast;
  for (size_t i = 0; i < part; ++i)
    start += Aligned(trainable(operation.parts[i].unit).elements * size);
  return {StateClass::kStaging, start, trainable(operation.parts[part].unit).elements * size};
}

Range Replay::Summed(const Operation& operation, size_t part) const {
  const int unit = operation.parts[part].unit;
  if (!rounds() && !plan_->decisions.accumulates[unit]) return GradientShard(unit, /*whole=*/false);
  return OwnSliceOf(Reduced(operation, part));
}

Range Replay::ReducedSlice(const Operation& operation, size_t part) const {
  if (!rounds()) return OwnSliceOf(Reduced(operation, part));
  const int64_t size = SizeOf(plan_->decisions.communication);
  int64_t start = plan_->pools.staging_rounded;
  for (size_t i = 0; i < part; ++i)
    start += Aligned(trainable(operation.parts[i].unit).shard * size);
  return {StateClass::kStaging, start, trainable(operation.parts[part].unit).shard * size};
}

Range Replay::OwnSliceOf(const Range& whole) const {
  const int64_t bytes = whole.bytes / plan_->decisions.shards;
  return {whole.pool, whole.begin + rank_ * bytes, bytes};
}

// Eight bytes for each 1,024 elements of the longest shard.
Range Replay::NormScratch() const {
  int64_t longest = 0;
  for (const UnitLayout& unit : plan_->layout.units)
    longest = std::max(longest, unit.trainable.shard);
  return {StateClass::kStaging, plan_->pools.staging_norm, (longest + 1023) / 1024 * 8};
}

Range Replay::Exchange() const {
  return {StateClass::kStaging, plan_->pools.staging_exchange,
          (plan_->decisions.world + 1) * kExchangeBytes};
}

Range Replay::Output(int visit, int64_t micro_batch, bool gradient) const {
  const VisitAddresses& addresses = plan_->pools.visits[visit];
  return {StateClass::kActivation,
          (gradient ? addresses.output_gradient : addresses.output) +
              micro_batch * addresses.boundary_stride,
          inputs_.model->forward[visit].output_bytes};
}

Content Replay::GradientOf(Content::Kind kind, int scope) const {
  const PlannedScope& s = plan_->scopes[scope];
  return {kind, s.visit, steps_, s.round};
}

}  // namespace ebb::sharding
