// The order of a step's operations, before slots are given out: what may start at each open and
// close of a scope. Gathers come as early as their slot and the prefetch limits allow, reductions
// with the last gradient of their bucket, early updates when a unit's gradient is final.
//
//   open F1     gather 2 | upload 3, gather 3
//   close B1    reduce bucket 0, update sub-groups 4 and 5, read the states of 6
//
// Slots are taken round-robin: an operation is issued after the last use of its slot.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/lower/passes.h"
#include "ebb/sharding/lower/swap_ins.h"

namespace ebb::sharding {

struct LogicalOp {
  enum Kind : uint8_t {
    kMark,              // the trainer's kernels outside of scopes
    kReadParameters,    // `index`: of SwapIns::reads
    kUploadParameters,  // group of gathers
    kGather,            // group of gathers
    kSendBoundary,      // visit: leaves the device
    kReadBoundary,      // visit: from the swap file
    kBringBoundary,     // visit: to the device
    kReduce,            // group of Reduction
    kHeldNorms,         // of the gradients of `units`
    kGatherGradients,   // of `units`
    kReadStates,        // sub-group
    kUpdate,            // sub-group, after its kReadStates
    kParameterNorms,    // sub-group
    kExchangeNorms,
    kRefresh,  // `units`
    kExchange
  };
  Kind kind{};
  int index = -1;
  std::vector<int> units = {};
};

struct LogicalMoment {
  Moment::Kind kind{};
  int scope = -1;
  std::vector<LogicalOp> operations = {};
};

std::vector<LogicalMoment> PlanLogical(const PassInputs& in, const SwapIns& swap_ins);

}  // namespace ebb::sharding
