// Conversions between number types, vectorised and spread over the team's threads.
#pragma once

#include <cstdint>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

enum class Rounding : uint8_t {
  // Ties to even: gradients, activations.
  kNearest,
  // bf16: half away from zero, so that the bf16 value and the cut 16 bits rebuild the fp32 value;
  // fp16: nearest.
  kParameter
};

// Converts between fp32, bf16 and fp16, and between fp32 and int8. The bytes of int8 are the
// numbers 0 to 255. Source and destination do not overlap, or they are the same memory with
// elements of one size. Equal types are copied unchanged. Bytes moved per element: the source's are
// read, the destination's are written.
void Cast(ThreadTeam& team, const void* source, DType source_dtype, void* destination,
          DType destination_dtype, int64_t count, Rounding rounding);

}  // namespace ebb::optim
