// Where every parameter of the model is: its unit, its section there, its offset in the section's
// flat buffer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/sharding/model.h"

namespace ebb::sharding {

// Parameters and slices start at multiples of this many elements: 128 bytes in 16-bit dtypes. In
// units with UnitSpec::state_block they start at multiples of that.
inline constexpr int64_t kAlignment = 64;

struct PlacedParameter {
  ParameterId parameter{};
  int64_t offset = 0, elements = 0;  // in the flat buffer
};

// How one section of a unit (its trainable or its frozen parameters) is laid flat and cut over the
// ranks.
//
//   | w1 ........ | b1 . | w2 .................. | b2 | 0 |   parameters, aligned; zero padding
//   | rank 0          | rank 1          | rank 2          |   equal slices; cuts may split one
//
// An all-gather of the slices gives the flat buffer that kernels read. A reduce-scatter reads the
// flat buffer that kernels write. So no copy is needed on the way.
struct Section {
  std::vector<PlacedParameter> placements;
  int64_t shard = 0;     // elements of one rank's slice, a multiple of the alignment
  int64_t elements = 0;  // shards * shard
};

// Lays out `parameters` for `shards` ranks. Parameters with cut_rows may start later, and slices
// may be longer, so that cuts fall between groups of rows. If that adds over 5% to the layout
// without such cuts, it is refused with the parameter's name.
absl::StatusOr<Section> Partition(const ModelSpec& model, std::span<const ParameterId> parameters,
                                  int shards, int64_t alignment = kAlignment);

// A unit is gathered as one or two flat buffers. Gradients, masters and optimizer states exist for
// the trainable one only.
struct UnitLayout {
  Section trainable, frozen;
  int64_t elements() const { return trainable.elements + frozen.elements; }
  int64_t shard() const { return trainable.shard + frozen.shard; }
};

struct ParameterLocation {
  int unit = 0;
  bool trainable = true;
  int64_t offset = 0, elements = 0;  // in the section
};

struct ModelLayout {
  int shards = 1;                             // ranks that each unit is cut over
  std::vector<UnitLayout> units;              // by UnitId
  std::vector<ParameterLocation> parameters;  // by ParameterId
};

inline const Section& SectionOf(const ModelLayout& layout, int unit, bool trainable) {
  const UnitLayout& of = layout.units[unit];
  return trainable ? of.trainable : of.frozen;
}

// A pure function of the model and the number of ranks: stages keep different parts of the slices,
// but the slices are the same.
absl::StatusOr<ModelLayout> LayOut(const ModelSpec& model, int shards);

}  // namespace ebb::sharding
