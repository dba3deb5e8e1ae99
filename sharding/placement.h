// Where every element of a rank's shards lives between its uses: on the device, in host memory or
// in the swap file.
//
//   a unit's shard    | device | cpu | nvme | nvme | cpu | nvme |    sub-groups, updated one by one
//   its parameters    | cpu ..................| nvme .........  |    pieces of the slice
//
// The part of a class that a faster tier keeps is fixed (DecidePlacement: which). Access is a cycle,
// so evicting the least recently used part would evict the next one needed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ebb/runtime/base/tier.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/layout.h"

namespace ebb::sharding {

struct Decisions;

// Masters and optimizer states of elements [begin, end) of a unit's updated elements on a rank.
struct SubGroup {
  int unit = 0;
  int64_t begin = 0, end = 0;
  Tier tier = Tier::kDevice;

  int64_t count() const { return end - begin; }
  friend bool operator==(const SubGroup&, const SubGroup&) = default;
};

// Elements [begin, end) of this rank's slice of a section, in the compute dtype.
struct ParameterPiece {
  int64_t begin = 0, end = 0;
  Tier tier = Tier::kDevice;

  int64_t count() const { return end - begin; }
};

struct UnitPlacement {
  std::vector<ParameterPiece> trainable, frozen;
  int first_sub_group = 0, sub_groups = 0;
  Tier gradient = Tier::kDevice;  // of the reduced shard

  const std::vector<ParameterPiece>& pieces(bool is_trainable) const {
    return is_trainable ? trainable : frozen;
  }
};

struct StatePlacement {
  std::vector<UnitPlacement> units;
  std::vector<SubGroup> sub_groups;  // by unit, in order
};

// Amounts that the config grants to the faster tiers.
struct PlacementLimits {
  int64_t sub_group_elements = 0;   // the most in a sub-group that passes through slots
  int64_t parameters_in_cpu = 0;    // elements, where the rest is on NVMe
  int64_t states_in_cpu_bytes = 0;  // of masters and states, where the rest is on NVMe
  double states_on_device = 0;      // share of the elements, where the rest is below
};

// Cuts are at multiples of this many elements of a shard. So the parts of every dtype of 2 bytes and
// more begin at multiples of kSwapAlignment. Each array of codes begins at one, whatever its length.
inline constexpr int64_t kCutElements = 2048;

// Tiers and cuts, without places.
StatePlacement DecidePlacement(const Decisions& decisions, const ModelLayout& layout,
                               const PlacementLimits& limits);

// Whether a gather can take its parameters from the masters that an early update reads anyway.
// `parameter`: where the sub-group's parameters are.
bool SharesMasters(const Decisions& decisions, const SubGroup& group, Tier parameter);
// If offload_param.device names a tier that gets no parameters: a sentence with the key that keeps
// them out of it. Else "".
std::string WhyNoneIsOffloaded(const Decisions& decisions, const StatePlacement& placement,
                               const Config& config);

}  // namespace ebb::sharding
