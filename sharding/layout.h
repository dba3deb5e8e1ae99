// Where every parameter of the model is: its unit, its section there, its offset in the section's
// flat buffer.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/partition.h"

namespace ebb::sharding {

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

// A pure function of the model and the number of ranks: stages keep different parts of the slices,
// but the slices are the same.
absl::StatusOr<ModelLayout> LayOut(const ModelSpec& model, int shards);

}  // namespace ebb::sharding
