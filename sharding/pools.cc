#include "ebb/sharding/pools.h"

#include <algorithm>
#include <numeric>

#include "ebb/sharding/boundaries.h"
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

// Masters and optimizer states of one tier, each class end to end.
class StatePool {
 public:
  StatePool(Tier tier, int64_t skew) : tier_(tier), skew_(skew), masters_(skew) {}

  void Take(SubGroup& group, const Decisions& d, bool has_master) {
    if (has_master) {
      group.master = {.tier = tier_,
                      .pool = StateClass::kMaster,
                      .offset = masters_.Take(group.count() * d.master_size())};
    }
    group.states = {.tier = tier_,
                    .pool = StateClass::kOptimizer,
                    .offset = 2 * skew_ + states_.Take(group.count() * 4)};
  }
  int64_t stride() const { return states_.end() + skew_; }
  int64_t master_bytes() const { return masters_.end() == skew_ ? 0 : masters_.end(); }
  int64_t state_bytes(int states) const {
    return states == 0 || states_.end() == 0 ? 0 : 2 * skew_ + states * stride() - skew_;
  }

 private:
  Tier tier_;
  int64_t skew_;
  Bump masters_, states_;
};

void LayOutParameters(const PoolInputs& in, Pools& pools) {
  const Decisions& d = *in.decisions;
  const int64_t size = SizeOf(d.compute);
  Bump device, host, file;
  for (size_t u = 0; u < in.layout->units.size(); ++u) {
    const UnitLayout& unit = in.layout->units[u];
    for (const bool trainable : {true, false}) {
      const Section& section = trainable ? unit.trainable : unit.frozen;
      int64_t& address =
          trainable ? pools.units[u].parameter_trainable : pools.units[u].parameter_frozen;
      const bool whole = d.kept_whole[u];
      if (whole || d.parameter_tier == Tier::kDevice)
        address = device.Take((whole ? section.elements : section.shard) * size);
      std::vector<ParameterPiece>& pieces =
          trainable ? pools.homes.units[u].trainable : pools.homes.units[u].frozen;
      for (ParameterPiece& piece : pieces) {
        piece.home.pool = StateClass::kParameter;
        if (piece.home.tier == Tier::kDevice) {
          piece.home.offset = address;
          piece.home.per_slice = whole ? section.shard * size : 0;
        } else if (piece.home.tier == Tier::kCpu) {
          piece.home.offset = host.Take(piece.count() * size);
        } else {
          piece.home.offset = file.Take(SwapAligned(piece.count() * size));
        }
      }
    }
  }
  Bytes(pools, StateClass::kParameter) = device.end();
  pools.host_bytes[static_cast<int>(StateClass::kParameter)] = host.end();
  pools.file_bytes[static_cast<int>(StateClass::kParameter)] = file.end();
}

void LayOutStates(const PoolInputs& in, Pools& pools) {
  const Decisions& d = *in.decisions;
  int64_t owned[kTiers] = {};  // elements of one state array
  for (const SubGroup& group : pools.homes.sub_groups)
    owned[static_cast<int>(group.tier)] += group.count();
  const auto skew = [&](Tier tier) {
    return owned[static_cast<int>(tier)] * 4 >= kHugePage ? kSkew : 0;
  };
  StatePool device(Tier::kDevice, skew(Tier::kDevice)), host(Tier::kCpu, skew(Tier::kCpu));
  int64_t file = 0, masters = 0, states = 0;
  for (SubGroup& group : pools.homes.sub_groups) {
    if (group.tier == Tier::kNvme) {
      // Master and states of a sub-group lie end to end: they are read and written together.
      const int64_t master = SwapAligned(group.count() * d.master_size());
      group.states_stride = SwapAligned(group.count() * 4);
      group.master = {.tier = Tier::kNvme, .pool = StateClass::kMaster, .offset = file};
      group.states = {.tier = Tier::kNvme, .pool = StateClass::kOptimizer, .offset = file + master};
      file += master + d.optimizer_states * group.states_stride;
      masters += master;
      states += d.optimizer_states * group.states_stride;
      continue;
    }
    (group.tier == Tier::kDevice ? device : host).Take(group, d, d.has_masters());
    if (!d.has_masters()) {
      const UnitHomes& unit = pools.homes.units[static_cast<size_t>(group.unit)];
      group.master = unit.trainable.front().home.Plus(group.begin * 4);
      if (d.stage == 0) group.master.per_slice = 0;  // updates the whole
    }
  }
  for (SubGroup& group : pools.homes.sub_groups) {
    if (group.tier == Tier::kDevice) group.states_stride = device.stride();
    if (group.tier == Tier::kCpu) group.states_stride = host.stride();
  }
  Bytes(pools, StateClass::kMaster) = device.master_bytes();
  Bytes(pools, StateClass::kOptimizer) = device.state_bytes(d.optimizer_states);
  pools.host_bytes[static_cast<int>(StateClass::kMaster)] = host.master_bytes();
  pools.host_bytes[static_cast<int>(StateClass::kOptimizer)] = host.state_bytes(d.optimizer_states);
  pools.file_bytes[static_cast<int>(StateClass::kMaster)] = masters;
  pools.file_bytes[static_cast<int>(StateClass::kOptimizer)] = states;
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
  Bump shards(Pack(blocks)), host;
  const int64_t states = pools.file_bytes[static_cast<int>(StateClass::kMaster)] +
                         pools.file_bytes[static_cast<int>(StateClass::kOptimizer)];
  int64_t file = states, slot = 0;
  for (size_t v = 0; v < in.model->forward.size(); ++v) {
    const int unit = static_cast<int>(in.model->forward[v].unit);
    pools.visits[v].gradient = blocks[d.keeps_step_gradients ? static_cast<int>(v) : unit].offset;
  }
  for (size_t u = 0; u < in.layout->units.size(); ++u) {
    const Section& section = in.layout->units[u].trainable;
    const int64_t elements = d.stage == 0 ? section.elements : section.shard;
    const Tier tier = pools.homes.units[u].gradient;
    const int64_t bytes = elements * SizeOf(d.shard_dtype(static_cast<int>(u)));
    if (tier == Tier::kNvme) {
      pools.units[u].gradient_shard = file;
      file += SwapAligned(bytes);
      slot = std::max(slot, SwapAligned(bytes));
    } else {
      pools.units[u].gradient_shard = (tier == Tier::kDevice ? shards : host).Take(bytes);
    }
  }
  pools.file_bytes[static_cast<int>(StateClass::kGradient)] = file - states;
  if (slot > 0) pools.gradient_slots = {.count = kGradientSlots, .bytes = slot, .first = {}};
  Bytes(pools, StateClass::kGradient) = shards.end();
  pools.host_bytes[static_cast<int>(StateClass::kGradient)] = host.end();
}

// Of boundaries that leave the device; in the swap file of states, after these.
void LayOutBoundaryHomes(const PoolInputs& in, const std::vector<BoundaryUse>& uses, Pools& pools) {
  const Tier tier = in.decisions->activation_tier;
  if (tier == Tier::kDevice) return;
  Bump host;
  int64_t file = 0, leaving = 0, largest = 0;
  for (int state = 0; state < kStateClasses; ++state) {
    if (static_cast<StateClass>(state) != StateClass::kParameter) file += pools.file_bytes[state];
  }
  const int64_t states = file;
  for (size_t v = 0; v < pools.visits.size(); ++v) {
    VisitAddresses& visit = pools.visits[v];
    visit.leaves = visit.boundary_stride > 0 && LeavesDevice(uses[v]);
    if (!visit.leaves) continue;
    const int64_t bytes =
        SwapAligned(visit.boundary_stride * in.decisions->micro_batches_per_round);
    visit.home = {.tier = tier,
                  .pool = StateClass::kActivation,
                  .offset = tier == Tier::kCpu ? host.Take(bytes) : file};
    if (tier == Tier::kNvme) file += bytes;
    largest = std::max(largest, bytes);
    ++leaving;
  }
  pools.host_bytes[static_cast<int>(StateClass::kActivation)] = host.end();
  pools.file_bytes[static_cast<int>(StateClass::kActivation)] = file - states;
  if (tier == Tier::kNvme && leaving > 0)
    pools.boundary_slots = {.count = kBoundarySlots, .bytes = largest, .first = {}};
}

// Boundary v is what visit v's forward wrote; visit v + 1 reads it in forward and backward and
// writes its gradient.
void LayOutBoundaries(const PoolInputs& in, Pools& pools) {
  const std::vector<Visit>& forward = in.model->forward;
  const std::vector<PlannedScope>& scopes = *in.scopes;
  const int visits = static_cast<int>(forward.size());
  const int64_t per_round = in.decisions->micro_batches_per_round;
  std::vector<PoolBlock> outputs(visits), gradients(visits);
  std::vector<BoundaryUse> uses = UsesInRound(scopes, 0, visits);
  int64_t largest = 0;
  for (int v = 0; v + 1 < visits; ++v) {
    pools.visits[v].boundary_stride = PoolAligned(forward[v].output_bytes);
    largest = std::max(largest, pools.visits[v].boundary_stride);
    outputs[v].bytes = gradients[v].bytes = pools.visits[v].boundary_stride * per_round;
  }
  if (largest == 0) return;
  LayOutBoundaryHomes(in, uses, pools);
  const auto use_of_round = [&](int s) -> const std::vector<BoundaryUse>& {
    if (scopes[s].round != scopes[uses.front().writer].round) {
      int first = s;
      while (first > 0 && scopes[first - 1].round == scopes[s].round) --first;
      uses = UsesInRound(scopes, static_cast<size_t>(first), visits);
    }
    return uses;
  };
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
      if (scope.visit > 0 && pools.visits[scope.visit - 1].leaves) {
        std::vector<Lifetime>& lives = outputs[scope.visit - 1].lifetimes;
        lives.back().end = CloseTick(use_of_round(s)[scope.visit - 1].reader + kBoundaryAhead);
        lives.push_back({OpenTick(s - kBoundaryAhead), CloseTick(s)});
      } else {
        extend(outputs, scope.visit - 1, /*begins=*/false);
      }
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

// The parts of a work slot, each at a multiple of the swap file's alignment.
class WorkSlot {
 public:
  explicit WorkSlot(int64_t elements) : elements_(elements) {}
  int64_t Take(bool needed, int64_t size, int arrays = 1) {
    if (!needed || arrays == 0) return -1;
    const int64_t at = bytes_;
    bytes_ += arrays * SwapAligned(elements_ * size);
    return at;
  }
  int64_t stride() const { return SwapAligned(elements_ * 4); }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t elements_, bytes_ = 0;
};

// What sub-groups need of work slots on either side.
struct WorkNeeds {
  bool states = false, gradient = false, parameter = false;
  bool any() const { return states || gradient || parameter; }
};

void LayOutSlots(const PoolInputs& in, Pools& pools, Bump& device, int64_t slice,
                 int64_t norm_blocks) {
  const Decisions& d = *in.decisions;
  if (!d.offloads()) return;
  const int64_t size = SizeOf(d.compute);
  Bump host;
  const auto on_host = [&](int64_t bytes) {
    return Place{
        .tier = Tier::kCpu, .pool = StateClass::kStaging, .offset = host.Take(SwapAligned(bytes))};
  };
  // Reads ahead of gathers.
  int64_t read_bytes = 0;
  int reads = 0;
  for (const GatherGroup& group : in.residency->groups) {
    int64_t bytes = 0;
    for (int stay : group.stays)
      bytes += SwapBytes(pools.homes, in.residency->stays[stay].unit, size);
    read_bytes = std::max(read_bytes, bytes);
    reads += bytes > 0 ? 1 : 0;
  }
  if (reads > 0) {
    const int count = std::min(reads, in.parameter_slots);
    pools.parameter_slots = {
        .count = count, .bytes = read_bytes, .first = on_host(count * read_bytes)};
  }
  // Sub-groups.
  WorkNeeds needs[2];  // of updates on the device, on the host
  // Carried updates leave parameters in the slots that gathers read from.
  const bool carries = in.carries;
  int64_t largest = 0;
  for (const SubGroup& group : pools.homes.sub_groups) {
    const UnitHomes& unit = pools.homes.units[static_cast<size_t>(group.unit)];
    const Tier parameter = PieceOf(unit.trainable, group.begin).home.tier;
    largest = std::max(largest, group.count());
    if (group.tier == Tier::kDevice) {
      needs[0].gradient |= unit.gradient != Tier::kDevice;
      needs[1].gradient |= unit.gradient == Tier::kNvme;
      needs[0].parameter |= parameter != Tier::kDevice;
      needs[1].parameter |= parameter == Tier::kNvme && !carries;
    } else {
      needs[1].states |= group.tier == Tier::kNvme;
      needs[1].gradient |= unit.gradient != Tier::kCpu;
      needs[1].parameter |= parameter == Tier::kDevice || (parameter == Tier::kNvme && !carries);
    }
  }
  const auto work = [&](const WorkNeeds& need) {
    WorkSlots slots;
    WorkSlot slot(largest);
    slots.master = slot.Take(need.states, d.master_size());
    slots.states_stride = slot.stride();
    slots.states = slot.Take(need.states, 4, d.optimizer_states);
    slots.gradient = slot.Take(need.gradient, 4);
    slots.parameter = slot.Take(need.parameter, size);
    slots.ring.bytes = slot.bytes();
    return slots;
  };
  if (needs[0].any()) {
    pools.device_work = work(needs[0]);
    pools.device_work.ring.count = 2;
    pools.device_work.ring.first = {.tier = Tier::kDevice,
                                    .pool = StateClass::kStaging,
                                    .offset = device.Take(2 * pools.device_work.ring.bytes)};
  }
  if (needs[1].any()) {
    pools.host_work = work(needs[1]);
    pools.host_work.ring.count = kWorkSlots;
    pools.host_work.ring.first = on_host(kWorkSlots * pools.host_work.ring.bytes);
  }
  // Gradients.
  int64_t landing = 0;
  for (const std::vector<int>& group : in.reduction->groups) {
    int64_t bytes = 0;
    for (int s : group) {
      const int unit = (*in.scopes)[s].unit;
      if (pools.homes.units[static_cast<size_t>(unit)].gradient != Tier::kDevice &&
          d.accumulates[static_cast<size_t>(unit)])
        bytes += PoolAligned(in.layout->units[static_cast<size_t>(unit)].trainable.shard *
                             SizeOf(d.communication));
    }
    landing = std::max(landing, bytes);
  }
  pools.landing = on_host(landing);
  pools.gradient_slots.first = on_host(pools.gradient_slots.count * pools.gradient_slots.bytes);
  pools.boundary_slots.first = on_host(pools.boundary_slots.count * pools.boundary_slots.bytes);
  pools.host_norm = on_host(norm_blocks * 8);
  if (d.own_optimizer && d.optimizer_tier != Tier::kDevice) {
    pools.host_gradient = on_host(slice * 4);
    if (d.split_master) pools.host_master = on_host(slice * 4);
  }
  pools.host_bytes[static_cast<int>(StateClass::kStaging)] = host.end();
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
  if (d.own_optimizer && d.split_master) pools.staging_master = staging.Take(slice * 4);
  LayOutSlots(in, pools, staging, slice, norm_blocks);
  Bytes(pools, StateClass::kStaging) = staging.end();
}

}  // namespace

Pools LayOutPools(const PoolInputs& inputs) {
  Pools pools;
  pools.units.resize(inputs.layout->units.size());
  pools.visits.resize(inputs.model->forward.size());
  pools.homes = *inputs.homes;
  LayOutParameters(inputs, pools);
  LayOutStates(inputs, pools);
  LayOutGather(inputs, pools);
  LayOutGradients(inputs, pools);
  LayOutBoundaries(inputs, pools);
  LayOutStaging(inputs, pools);
  Bytes(pools, StateClass::kWorkspace) = inputs.model->workspace_bytes;
  return pools;
}

int Pools::SlotIndex(SlotKind kind, int turn) const {
  const int parameters = parameter_slots.count, host = host_work.ring.count;
  switch (kind) {
    case SlotKind::kParameter:
      return turn % parameters;
    case SlotKind::kParameterStored:
      return parameters + turn % parameters;
    case SlotKind::kHostWork:
      return 2 * parameters + turn % host;
    case SlotKind::kDeviceWork:
      return 2 * parameters + host + turn % device_work.ring.count;
    case SlotKind::kBoundary:
      return 2 * parameters + host + device_work.ring.count + turn % boundary_slots.count;
    case SlotKind::kGradient:
      return 2 * parameters + host + device_work.ring.count + boundary_slots.count +
             turn % gradient_slots.count;
  }
  return 0;
}

}  // namespace ebb::sharding
