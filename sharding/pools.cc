#include "ebb/sharding/pools.h"

#include <algorithm>
#include <numeric>

#include "ebb/sharding/interval.h"

namespace ebb::sharding {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
// Arrays that one kernel streams through together must not start at the same offset of a huge page,
// or their lines compete for the same cache sets and memory banks. A multiple of kPoolAlignment.
constexpr int64_t kSkew = 69'888;

// Gives out addresses end to end.
class Bump {
 public:
  explicit Bump(int64_t start = 0) : end_(start) {}
  int64_t Take(int64_t bytes) {
    const int64_t at = end_;
    end_ += PoolAligned(bytes);
    return at;
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

int64_t& Bytes(Pools& pools, StateClass state) {
  return pools.bytes[static_cast<int>(state)];
}

// Parameters, masters and optimizer states.
void LayOutStates(const PoolInputs& in, Pools& pools) {
  const Decisions& d = *in.decisions;
  const int64_t compute_size = SizeOf(d.compute);
  int64_t owned = 0;  // fp32 elements of one state array
  for (const UnitLayout& unit : in.layout->units)
    owned += d.stage == 0 ? unit.trainable.elements : unit.trainable.shard;
  const int64_t skew = owned * 4 >= kHugePage ? kSkew : 0;

  Bump parameters, masters(skew), states;
  for (size_t u = 0; u < in.layout->units.size(); ++u) {
    const UnitLayout& unit = in.layout->units[u];
    UnitAddresses& addresses = pools.units[u];
    const bool whole = d.kept_whole[u];
    addresses.parameter_trainable =
        parameters.Take((whole ? unit.trainable.elements : unit.trainable.shard) * compute_size);
    addresses.parameter_frozen =
        parameters.Take((whole ? unit.frozen.elements : unit.frozen.shard) * compute_size);
    const int64_t states_bytes =
        (d.stage == 0 ? unit.trainable.elements : unit.trainable.shard) * 4;
    if (d.compute != DType::kFloat32) addresses.master = masters.Take(states_bytes);
    addresses.state = states.Take(states_bytes);
  }
  Bytes(pools, StateClass::kParameter) = parameters.end();
  Bytes(pools, StateClass::kMaster) = masters.end() == skew ? 0 : masters.end();
  if (d.optimizer_states > 0 && states.end() > 0) {
    pools.state_base = 2 * skew;
    pools.state_stride = states.end() + skew;
    Bytes(pools, StateClass::kOptimizer) =
        pools.state_base + d.optimizer_states * pools.state_stride - skew;
  }
}

void LayOutGather(const PoolInputs& in, Pools& pools) {
  const int64_t size = SizeOf(in.decisions->compute);
  std::vector<PoolBlock> blocks(in.layout->units.size());
  for (size_t u = 0; u < blocks.size(); ++u) {
    if (in.decisions->kept_whole[u]) continue;
    const UnitLayout& unit = in.layout->units[u];
    blocks[u].bytes =
        PoolAligned(unit.trainable.elements * size) + PoolAligned(unit.frozen.elements * size);
    blocks[u].lifetimes = in.residency->lifetimes[u];
  }
  Bytes(pools, StateClass::kGather) = Pack(blocks);
  for (size_t u = 0; u < blocks.size(); ++u) {
    pools.units[u].gather_trainable = blocks[u].offset;
    pools.units[u].gather_frozen =
        blocks[u].offset + PoolAligned(in.layout->units[u].trainable.elements * size);
  }
}

void LayOutGradients(const PoolInputs& in, Pools& pools) {
  const Decisions& d = *in.decisions;
  std::vector<PoolBlock> blocks(in.reduction->lifetimes.size());
  for (size_t v = 0; v < in.model->forward.size(); ++v) {
    const int unit = static_cast<int>(in.model->forward[v].unit);
    const int key = d.keeps_step_gradients ? static_cast<int>(v) : unit;
    blocks[key].bytes = in.layout->units[unit].trainable.elements * SizeOf(d.gradient);
    blocks[key].lifetimes = in.reduction->lifetimes[key];
  }
  Bump shards(Pack(blocks));
  for (size_t v = 0; v < in.model->forward.size(); ++v) {
    const int unit = static_cast<int>(in.model->forward[v].unit);
    pools.visits[v].gradient = blocks[d.keeps_step_gradients ? static_cast<int>(v) : unit].offset;
  }
  for (size_t u = 0; u < in.layout->units.size(); ++u) {
    const Section& section = in.layout->units[u].trainable;
    const int64_t elements = d.stage == 0 ? section.elements : section.shard;
    pools.units[u].gradient_shard =
        shards.Take(elements * SizeOf(d.shard_dtype(static_cast<int>(u))));
  }
  Bytes(pools, StateClass::kGradient) = shards.end();
}

// Boundary v is what visit v's forward wrote; visit v + 1 reads it in forward and backward and
// writes its gradient.
void LayOutBoundaries(const PoolInputs& in, Pools& pools) {
  const std::vector<Visit>& forward = in.model->forward;
  const std::vector<PlannedScope>& scopes = *in.scopes;
  const int visits = static_cast<int>(forward.size());
  const int64_t per_round = in.decisions->micro_batches_per_round;
  std::vector<PoolBlock> outputs(visits), gradients(visits);
  int64_t largest = 0;
  for (int v = 0; v + 1 < visits; ++v) {
    pools.visits[v].boundary_stride = PoolAligned(forward[v].output_bytes);
    largest = std::max(largest, pools.visits[v].boundary_stride);
    outputs[v].bytes = gradients[v].bytes = pools.visits[v].boundary_stride * per_round;
  }
  if (largest == 0) return;
  for (int s = 0; s < static_cast<int>(scopes.size()); ++s) {
    const PlannedScope& scope = scopes[s];
    const auto extend = [&](std::vector<PoolBlock>& blocks, int visit, bool begins) {
      if (visit < 0 || visit + 1 >= visits) return;
      if (begins) {
        blocks[visit].lifetimes.push_back({OpenTick(s), CloseTick(s)});
      } else if (!blocks[visit].lifetimes.empty()) {
        blocks[visit].lifetimes.back().end = CloseTick(s);
      }
    };
    if (!scope.backward) {
      extend(outputs, scope.visit, /*begins=*/true);
      extend(outputs, scope.visit - 1, /*begins=*/false);
    } else {
      extend(outputs, scope.visit - 1, /*begins=*/false);
      if (scope.visit > FirstTrainableVisit(*in.model))
        extend(gradients, scope.visit - 1, /*begins=*/true);
      extend(gradients, scope.visit, /*begins=*/false);
    }
  }
  std::vector<PoolBlock> all = outputs;
  all.insert(all.end(), gradients.begin(), gradients.end());
  int64_t bytes = Pack(all);
  // One walk of an evaluation over a round's micro-batches always fits: two boundaries each.
  bytes = std::max(bytes, 2 * largest * in.micro_batches);
  for (int v = 0; v < visits; ++v) {
    pools.visits[v].output = all[v].offset;
    pools.visits[v].output_gradient = all[visits + v].offset;
  }
  Bytes(pools, StateClass::kActivation) = bytes;
  pools.evaluation_stride = largest;
  pools.evaluation_micro_batches = bytes / (2 * largest);
}

void LayOutStaging(const PoolInputs& in, Pools& pools) {
  const Decisions& d = *in.decisions;
  int64_t cast = 0, rounded = 0, norm_blocks = 0, slice = 0;
  for (const std::vector<int>& group : in.reduction->groups) {
    int64_t whole = 0, slices = 0;
    for (int s : group) {
      const Section& section = in.layout->units[(*in.scopes)[s].unit].trainable;
      whole += PoolAligned(section.elements * SizeOf(d.reduced()));
      slices += PoolAligned(section.shard * SizeOf(d.communication));
    }
    cast = std::max(cast, whole);
    rounded = std::max(rounded, slices);
  }
  for (const UnitLayout& unit : in.layout->units) {
    norm_blocks = std::max(norm_blocks, (unit.trainable.shard + 1023) / 1024);
    const int64_t owned = d.stage == 0 ? unit.trainable.elements : unit.trainable.shard;
    for (const Placement& p : unit.trainable.placements)
      slice = std::max(slice, std::min(p.elements, owned));
  }
  Bump staging;
  if (d.casts()) pools.staging_cast = staging.Take(cast);
  if (d.rounds_slices()) pools.staging_rounded = staging.Take(rounded);
  pools.staging_norm = staging.Take(norm_blocks * 8);
  pools.staging_exchange = staging.Take((d.world + 1) * kExchangeBytes);
  if (d.own_optimizer) pools.staging_gradient = staging.Take(slice * 4);
  Bytes(pools, StateClass::kStaging) = staging.end();
}

}  // namespace

Pools LayOutPools(const PoolInputs& inputs) {
  Pools pools;
  pools.units.resize(inputs.layout->units.size());
  pools.visits.resize(inputs.model->forward.size());
  LayOutStates(inputs, pools);
  LayOutGather(inputs, pools);
  LayOutGradients(inputs, pools);
  LayOutBoundaries(inputs, pools);
  LayOutStaging(inputs, pools);
  Bytes(pools, StateClass::kWorkspace) = inputs.model->workspace_bytes;
  return pools;
}

}  // namespace ebb::sharding
