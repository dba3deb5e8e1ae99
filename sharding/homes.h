// Where every element of a rank's shards lives between its uses: on the device, in host memory or
// in the swap file.
//
//   a unit's shard    | device | cpu | nvme | nvme | cpu | nvme |     sub-groups, each updated in one go
//   its parameters    | cpu ..................| nvme .........  |     pieces of the slice
//
// What a class keeps in a faster tier is a fixed part of it, spread evenly over the model: the order
// of access is a cycle, so that whatever a recency rule would drop is just what comes next.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/place.h"

namespace ebb::sharding {

struct Decisions;

// Masters and optimizer states of elements [begin, end) of what a rank updates of a unit.
struct SubGroup {
  int unit = 0;
  int64_t begin = 0, end = 0;
  Tier tier = Tier::kDevice;
  // Masters: fp32, or the low halves of split ones; state k at states + k * states_stride. Masters
  // that are the parameters (fp32, nothing offloaded) are in the parameter pool.
  Place master = {}, states = {};
  int64_t states_stride = 0;

  int64_t count() const { return end - begin; }
};

// Elements [begin, end) of this rank's slice of a section, in the compute dtype.
struct ParameterPiece {
  int64_t begin = 0, end = 0;
  Place home;

  int64_t count() const { return end - begin; }
};

struct UnitHomes {
  std::vector<ParameterPiece> trainable, frozen;
  int first_sub_group = 0, sub_groups = 0;
  Tier gradient = Tier::kDevice;  // of the reduced shard

  const std::vector<ParameterPiece>& pieces(bool is_trainable) const {
    return is_trainable ? trainable : frozen;
  }
};

struct Homes {
  std::vector<UnitHomes> units;
  std::vector<SubGroup> sub_groups;  // by unit, in order
};

// What the config grants to the faster tiers.
struct HomeLimits {
  int64_t sub_group_elements = 0;   // at most, of sub-groups that pass through slots
  int64_t parameters_in_cpu = 0;    // elements, where the rest is on NVMe
  int64_t states_in_cpu_bytes = 0;  // of masters and states, where the rest is on NVMe
  double states_on_device = 0;      // share of the elements, where the rest is below
};

// Cuts fall at multiples of this many elements of a shard, so that the parts of every dtype begin at
// multiples of kSwapAlignment.
inline constexpr int64_t kCutElements = 2048;

// Tiers and cuts; addresses are LayOutPools's.
Homes DecideHomes(const Decisions& decisions, const ModelLayout& layout, const HomeLimits& limits);

// The piece that holds element `at`.
const ParameterPiece& PieceOf(const std::vector<ParameterPiece>& pieces, int64_t at);
// Whether a gather can take its parameters from the masters that an early update reads anyway.
bool SharesMasters(const Decisions& decisions, const Homes& homes, const SubGroup& group);
// What gathering a unit reads of the swap file, `size` bytes an element.
int64_t SwapBytes(const Homes& homes, int unit, int64_t size);
// Where offload_param.device names a tier that gets none of the parameters: a sentence with the key
// that keeps them out of it. Else "".
std::string WhyNoneIsOffloaded(const Decisions& decisions, const Homes& homes,
                               const Config& config);

}  // namespace ebb::sharding
