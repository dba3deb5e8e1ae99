#include "ebb/sharding/pools/pools.h"

#include <algorithm>

#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/pools/pool_parts.h"
#include "ebb/sharding/scopes.h"

namespace ebb::sharding {
namespace {

void LayOutGather(const PoolInputs& in, Pools& pools) {
  const auto size = [&](size_t unit) {
    return SizeOf(in.decisions->compute_of(static_cast<int>(unit)));
  };
  std::vector<PoolBlock> blocks(in.layout->units.size());
  for (size_t u = 0; u < blocks.size(); ++u) {
    if (in.decisions->kept_whole[u]) continue;
    const UnitLayout& unit = in.layout->units[u];
    blocks[u].bytes = PoolAligned(unit.trainable.elements * size(u)) +
                      PoolAligned(unit.frozen.elements * size(u));
    blocks[u].lifetimes = in.residency->lifetimes[u];
    if (in.walk == nullptr) continue;
    const int end_of_step = 2 * static_cast<int>(in.scopes->size()) + 1;
    for (const Lifetime& life : in.walk->lifetimes[u])
      blocks[u].lifetimes.push_back({end_of_step + life.begin, end_of_step + life.end});
  }
  Bytes(pools, StateClass::kGather) = Pack(blocks);
  for (size_t u = 0; u < blocks.size(); ++u) {
    pools.units[u].gather_trainable = blocks[u].offset;
    pools.units[u].gather_frozen =
        blocks[u].offset + PoolAligned(in.layout->units[u].trainable.elements * size(u));
  }
}

// Secondary shards of units that a step gathers more than once. Every step fills the ones that it
// reads.
void LayOutSecondary(const PoolInputs& in, Pools& pools) {
  const Decisions& d = *in.decisions;
  if (!d.has_secondary()) return;
  std::vector<bool> fills(in.layout->units.size(), false);
  for (const ResidencyInterval& interval : in.residency->intervals) {
    if (interval.fills_secondary) fills[static_cast<size_t>(interval.unit)] = true;
  }
  Bump secondary;
  for (size_t u = 0; u < fills.size(); ++u) {
    if (!fills[u]) continue;
    const UnitLayout& unit = in.layout->units[u];
    const int64_t size = SizeOf(d.compute_of(static_cast<int>(u)));
    pools.units[u].secondary_trainable = secondary.Take(d.SecondaryShard(unit.trainable) * size);
    pools.units[u].secondary_frozen = secondary.Take(d.SecondaryShard(unit.frozen) * size);
  }
  Bytes(pools, StateClass::kSecondary) = secondary.end();
}

void LayOutGradients(const PoolInputs& in, Pools& pools) {
  const Decisions& d = *in.decisions;
  std::vector<PoolBlock> blocks(in.reduction->lifetimes.size());
  const std::vector<bool> takes_gradients = VisitsWithGradients(*in.model);
  for (size_t v = 0; v < in.model->forward.size(); ++v) {
    const int unit = static_cast<int>(in.model->forward[v].unit);
    const int key = d.keeps_step_gradients ? static_cast<int>(v) : unit;
    if (!takes_gradients[v] || GradientIsShard(d, pools.placement, unit)) continue;
    blocks[key].bytes = in.layout->units[unit].trainable.elements * SizeOf(d.gradient_of(unit));
    blocks[key].lifetimes = in.reduction->lifetimes[key];
  }
  Bump shards(Pack(blocks)), host;
  const int64_t states = pools.file_bytes[static_cast<int>(StateClass::kMaster)] +
                         pools.file_bytes[static_cast<int>(StateClass::kOptimizer)];
  int64_t file = states, slot = 0;
  for (size_t u = 0; u < in.layout->units.size(); ++u) {
    const Section& section = in.layout->units[u].trainable;
    const int64_t elements = d.stage == 0 ? section.elements : section.shard;
    const Tier tier = pools.placement.units[u].gradient;
    const int64_t bytes = elements * SizeOf(d.shard_dtype(static_cast<int>(u)));
    if (tier == Tier::kNvme) {
      pools.units[u].gradient_shard = file;
      file += SwapAligned(bytes);
      slot = std::max(slot, SwapAligned(bytes));
    } else {
      pools.units[u].gradient_shard = (tier == Tier::kDevice ? shards : host).Take(bytes);
    }
  }
  for (size_t v = 0; v < in.model->forward.size(); ++v) {
    const int unit = static_cast<int>(in.model->forward[v].unit);
    pools.visits[v].gradient =
        GradientIsShard(d, pools.placement, unit)
            ? pools.units[static_cast<size_t>(unit)].gradient_shard
            : blocks[d.keeps_step_gradients ? static_cast<int>(v) : unit].offset;
  }
  pools.file_bytes[static_cast<int>(StateClass::kGradient)] = file - states;
  if (slot > 0) pools.gradient_slots = {.count = kGradientSlots, .bytes = slot, .first = {}};
  Bytes(pools, StateClass::kGradient) = shards.end();
  pools.host_bytes[static_cast<int>(StateClass::kGradient)] = host.end();
}

// For the largest bucket, or as much as a piece of it needs: megabytes use the links well, and of
// many ranks each still sends no crumbs.
int64_t SumScratchBytes(int world, int64_t bucket) {
  constexpr int64_t kBytesMax = int64_t{64} << 20, kRankBytes = int64_t{256} << 10;
  const int64_t least = world * kPoolAlignment;  // a line a rank
  return std::min(PoolAligned(std::max(bucket, least)), std::max(kBytesMax, world * kRankBytes));
}

void LayOutStaging(const PoolInputs& in, Pools& pools) {
  const Decisions& d = *in.decisions;
  int64_t sent = 0, cast = 0, rounded = 0, norm_blocks = 0, slice = 0;
  for (const std::vector<int>& group : in.reduction->groups) {
    int64_t whole = 0, slices = 0;
    for (int s : group) {
      const int unit = (*in.scopes)[s].unit;
      const Section& section = in.layout->units[unit].trainable;
      whole += PoolAligned(section.elements * SizeOf(d.reduced(unit)));
      slices += PoolAligned(section.shard * SizeOf(d.communication_of(unit)));
    }
    const int first = (*in.scopes)[group.front()].unit;
    sent = std::max(sent, whole);
    if (d.casts(first)) cast = std::max(cast, whole);
    if (d.rounds_slices(first)) rounded = std::max(rounded, slices);
  }
  for (const UnitLayout& unit : in.layout->units) {
    norm_blocks = std::max(norm_blocks, (unit.trainable.shard + 1023) / 1024);
    const int64_t owned = d.stage == 0 ? unit.trainable.elements : unit.trainable.shard;
    for (const PlacedParameter& p : unit.trainable.placements)
      slice = std::max(slice, std::min(p.elements, owned));
  }
  Bump staging;
  if (cast > 0) pools.staging_cast = staging.Take(cast);
  if (rounded > 0) pools.staging_rounded = staging.Take(rounded);
  pools.staging_norm = staging.Take(norm_blocks * 8);
  pools.staging_exchange = staging.Take((d.verdict_ranks + 1) * RecordBytes(d));
  if (const NormRecords norms = LayOutNormRecords(*in.layout, d); norms.sums > 0) {
    pools.staging_norm_sums = staging.Take(norms.sums * kNormSumsBytes);
    if (norms.exchanged) pools.staging_norm_records = staging.Take((d.shards + 1) * norms.bytes());
  }
  if (d.sums_in_scratch && sent > 0) {
    pools.staging_sums_bytes = SumScratchBytes(d.world, sent);
    pools.staging_sums = staging.Take(pools.staging_sums_bytes);
  }
  if (d.own_optimizer) pools.staging_gradient = staging.Take(slice * 4);
  if (d.own_optimizer && d.reads_any_parameters()) pools.staging_master = staging.Take(slice * 4);
  LayOutSlots(in, pools, staging, slice, norm_blocks);
  Bytes(pools, StateClass::kStaging) = staging.end();
}

}  // namespace

Pools LayOutPools(const PoolInputs& inputs) {
  Pools pools;
  pools.units.resize(inputs.layout->units.size());
  pools.visits.resize(inputs.model->forward.size());
  pools.placement = *inputs.placement;
  LayOutParameters(inputs, pools);
  LayOutStates(inputs, pools);
  LayOutGather(inputs, pools);
  LayOutSecondary(inputs, pools);
  LayOutGradients(inputs, pools);
  LayOutBoundaries(inputs, pools);
  LayOutStaging(inputs, pools);
  Bytes(pools, StateClass::kWorkspace) = inputs.model->workspace_bytes;
  return pools;
}

namespace {

bool Overlap(std::pair<int64_t, int64_t> a, std::pair<int64_t, int64_t> b) {
  return a.first < b.second && b.first < a.second;
}

}  // namespace

std::pair<int64_t, int64_t> GatherMemory(const Plan& plan, int unit) {
  const UnitAddresses& addresses = plan.pools.units[static_cast<size_t>(unit)];
  const Section& frozen = plan.layout.units[static_cast<size_t>(unit)].frozen;
  return {addresses.gather_trainable,
          addresses.gather_frozen + frozen.elements * SizeOf(plan.decisions.compute_of(unit))};
}

bool GathersConflict(const Plan& plan, int unit, int other) {
  const std::vector<bool>& kept_whole = plan.decisions.kept_whole;
  return unit != other && !kept_whole[unit] && !kept_whole[other] &&
         Overlap(GatherMemory(plan, unit), GatherMemory(plan, other));
}

}  // namespace ebb::sharding
