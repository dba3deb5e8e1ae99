// The arithmetic of reductions, for every backend in which ranks read each other's memory.
#pragma once

#include <cstdint>
#include <span>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

enum class ReduceOp : uint8_t { kSum, kMax, kMin };

struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  float scale = 1;
  int group = 0;  // consecutive inputs reduced first; 0: all. Divides the number of inputs
};

// destination[i] = scale * (inputs[0][i] op inputs[1][i] op ...), in fp32 in the order that
// communicator.h states, rounded once. `destination` is one of the inputs or overlaps none.
//
// The bits depend on nothing else: neither SIMD width, nor threads, nor cuts. A result that is NaN
// is the positive quiet NaN without payload, because which operand's payload survives an addition
// differs between machines; of equal values (-0 and +0) max and min keep the first. int8 saturates.
//
// Bytes per element: each input read once, the destination written. `together_bytes`: bytes that
// the whole operation writes, if they are more than this call's. Large results bypass the caches.
void Reduce(ThreadTeam& team, const Reduction& reduction, std::span<const void* const> inputs,
            void* destination, int64_t count, int64_t together_bytes = 0);

}  // namespace ebb
