// Copies the parameters of one model to another model with other cuts: a list of element ranges,
// each from one rank to one rank. Shards go to shards, by intervals; no rank holds a parameter
// whole.
//
//   source, 2 shards        | rank 0 ................ | rank 1 ................ |
//   destination, 3 shards   | rank 0 ...... | rank 1 ........ | rank 2 ...... |
//   transfers                 0 to 0          0 to 1, 1 to 1    1 to 2
//
// If a side repeats its shards over groups of ranks, each destination takes from its own source
// group.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/model.h"

namespace ebb::sharding {

struct CopySide {
  const ModelSpec* model = nullptr;
  const ModelLayout* layout = nullptr;
  DType compute{};
  DType master = DType::kFloat32;
};

struct Transfer {
  ParameterId source{}, destination{};
  int64_t begin = 0, end = 0;    // elements of the flattened parameter
  int from = 0, to = 0;          // ranks of the world; the same: within its memory
  DType dtype{};                 // between ranks: the narrower of the source's dtype and the
                                 // destination's
  int64_t staged_bytes() const;  // of a message's memory, aligned; 0 within a rank
};

struct CopyPlan {
  // The order puts all transfers of a pair of ranks together, as one message. Ranks that send and
  // receive in this order never wait for each other in a circle. No rank sends or receives more
  // than `staging_bytes_max` in one round.
  std::vector<std::vector<Transfer>> rounds;
  int64_t staging_bytes = 0;  // the most that a rank sends or receives in one round
};

// For each parameter of the destination, the source's parameter of that name. Errors: the source
// lacks a name, has another whole shape, or bytes for numbers.
absl::StatusOr<std::vector<ParameterId>> MatchByName(const ModelSpec& source,
                                                     const ModelSpec& destination);

// Every parameter of the destination, in declared order, from the source's parameter of that name:
// masters of trainable ones, values in the compute dtype of frozen ones. Other parameters of the
// source are left out. Errors: the source lacks a name, or has another shape.
absl::StatusOr<CopyPlan> PlanCopy(const CopySide& source, const CopySide& destination, int world,
                                  int64_t staging_bytes_max);

}  // namespace ebb::sharding
