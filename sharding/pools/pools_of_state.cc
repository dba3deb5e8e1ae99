// Addresses of parameters, masters and optimizer states: on the device, in host memory and in the
// swap files, each tier end to end.
#include "ebb/sharding/pools/pool_parts.h"

namespace ebb::sharding {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
// One kernel streams through these arrays together. The arrays must not start at the same offset of
// a huge page, or their lines compete for the same cache sets and memory banks. A multiple of
// kPoolAlignment.
constexpr int64_t kSkew = 69'888;

// Masters and optimizer states of one tier, each class end to end.
class StatePool {
 public:
  StatePool(Tier tier, int64_t skew) : tier_(tier), skew_(skew), masters_(skew) {}

  void Take(SubGroup& group, const Decisions& d, bool has_master) {
    if (has_master) {
      group.master = {.tier = tier_,
                      .pool = StateClass::kMaster,
                      .offset = masters_.Take(group.count() * d.master_size(group.unit))};
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

}  // namespace

void LayOutParameters(const PoolInputs& in, Pools& pools) {
  const Decisions& d = *in.decisions;
  Bump device, host, file;
  for (size_t u = 0; u < in.layout->units.size(); ++u) {
    const int64_t size = SizeOf(d.compute_of(static_cast<int>(u)));
    const UnitLayout& unit = in.layout->units[u];
    for (const bool trainable : {true, false}) {
      const Section& section = trainable ? unit.trainable : unit.frozen;
      int64_t& address =
          trainable ? pools.units[u].parameter_trainable : pools.units[u].parameter_frozen;
      const bool whole = d.kept_whole[u];
      if (whole || d.parameter_tier == Tier::kDevice)
        address = device.Take((whole ? section.elements : section.shard) * size);
      std::vector<ParameterPiece>& pieces =
          trainable ? pools.placement.units[u].trainable : pools.placement.units[u].frozen;
      for (ParameterPiece& piece : pieces) {
        piece.place.pool = StateClass::kParameter;
        if (piece.place.tier == Tier::kDevice) {
          piece.place.offset = address;
          piece.place.per_slice = whole ? section.shard * size : 0;
        } else if (piece.place.tier == Tier::kCpu) {
          piece.place.offset = host.Take(piece.count() * size);
        } else {
          piece.place.offset = file.Take(SwapAligned(piece.count() * size));
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
  for (const SubGroup& group : pools.placement.sub_groups)
    owned[static_cast<int>(group.tier)] += group.count();
  const auto skew = [&](Tier tier) {
    return owned[static_cast<int>(tier)] * 4 >= kHugePage ? kSkew : 0;
  };
  StatePool device(Tier::kDevice, skew(Tier::kDevice)), host(Tier::kCpu, skew(Tier::kCpu));
  int64_t file = 0, masters = 0, states = 0;
  for (SubGroup& group : pools.placement.sub_groups) {
    if (group.tier == Tier::kNvme) {
      // Master and states of a sub-group lie end to end: they are read and written together.
      const int64_t master = SwapAligned(group.count() * d.master_size(group.unit));
      group.states_stride = SwapAligned(group.count() * 4);
      if (master > 0)
        group.master = {.tier = Tier::kNvme, .pool = StateClass::kMaster, .offset = file};
      group.states = {.tier = Tier::kNvme, .pool = StateClass::kOptimizer, .offset = file + master};
      file += master + d.optimizer_states * group.states_stride;
      masters += master;
      states += d.optimizer_states * group.states_stride;
      continue;
    }
    const bool is_copy = d.writes_parameters(group.unit);
    (group.tier == Tier::kDevice ? device : host)
        .Take(group, d, is_copy && d.master_size(group.unit) > 0);
    if (!is_copy) {
      const UnitPlacement& unit = pools.placement.units[static_cast<size_t>(group.unit)];
      group.master = unit.trainable.front().place.Plus(group.begin * 4);
      if (d.stage == 0) group.master.per_slice = 0;  // at stage 0 each rank updates the whole unit
    }
  }
  for (SubGroup& group : pools.placement.sub_groups) {
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

}  // namespace ebb::sharding
