// How parameters of one model become those of another that is cut differently: which elements go
// from which rank to which. Shards to shards, by intervals; no rank holds a parameter whole.
//
//   source, 2 shards        | rank 0 ................ | rank 1 ................ |
//   destination, 3 shards   | rank 0 ...... | rank 1 ........ | rank 2 ...... |
//   transfers                 0 to 0          0 to 1, 1 to 1    1 to 2
//
// Where a side repeats its shards over groups of ranks, each destination takes from the source group
// that it is itself a member of.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/dtype.h"
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
  DType dtype{};                 // between ranks: the narrower of what the source has and the
                                 // destination keeps
  int64_t staged_bytes() const;  // of a message's memory, aligned; 0 within a rank
};

struct CopyPlan {
  // Each ordered so that what goes from one rank to another is together, one message; and so that
  // ranks that send and receive in this order never wait for each other in a circle. No rank sends
  // or receives more than `staging_bytes_max` in one.
  std::vector<std::vector<Transfer>> rounds;
  int64_t staging_bytes = 0;  // the most that a rank sends or receives in one
};

// Every parameter of the destination, in declared order, from the source's of the same name: of
// trainable ones the masters, of frozen ones the values in the compute dtype. What the source
// has beside them is left out. Errors: a name that the source lacks, or another shape there.
absl::StatusOr<CopyPlan> PlanCopy(const CopySide& source, const CopySide& destination, int world,
                                  int64_t staging_bytes_max);

}  // namespace ebb::sharding
