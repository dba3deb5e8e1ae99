// The arguments of a cast (cast.h) for a kernel.
#pragma once

#include <cstdint>

#include "ebb/optim/cast.h"
#include "ebb/runtime/base/dtype.h"

namespace ebb::optim {

struct CastArrays {
  const void* source = nullptr;
  DType source_dtype = DType::kFloat32;
  DType via = DType::kFloat32;  // rounded to this first, to nearest
  void* destination = nullptr;
  DType destination_dtype = DType::kFloat32;
  int64_t count = 0;
  Rounding rounding = Rounding::kNearest;
  float factor = 1;  // applied before the number is rounded
};

// The arguments of a matrix's scaling by its norm (newton_schulz.h), which a kernel has summed.
struct NormaliseArrays {
  const void* source = nullptr;
  DType source_dtype = DType::kFloat32;
  void* destination = nullptr;
  DType destination_dtype = DType::kFloat32;
  int64_t count = 0;
  const double* squares = nullptr;
  float epsilon = 0;
};

}  // namespace ebb::optim
