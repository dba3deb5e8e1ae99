// A cast (cast.h) as a kernel gets it.
#pragma once

#include <cstdint>

#include "ebb/optim/cast.h"
#include "ebb/runtime/config/dtype.h"

namespace ebb::optim {

struct CastArrays {
  const void* source = nullptr;
  DType source_dtype = DType::kFloat32;
  DType via = DType::kFloat32;  // what it is rounded to on the way, to nearest
  void* destination = nullptr;
  DType destination_dtype = DType::kFloat32;
  int64_t count = 0;
  Rounding rounding = Rounding::kNearest;
  float factor = 1;  // of the number before it is rounded
};

}  // namespace ebb::optim
