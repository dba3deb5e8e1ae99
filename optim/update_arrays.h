// The arrays of one optimizer step (update.h) over one contiguous run of a shard.
#pragma once

#include <cstdint>

#include "ebb/runtime/config/dtype.h"

namespace ebb::optim {

inline constexpr int kStatesMax = 2;

struct UpdateArrays {
  float* master = nullptr;  // not read where master_low is given
  const void* gradient = nullptr;
  DType gradient_dtype = DType::kFloat32;
  float* states[kStatesMax] = {};
  void* parameter = nullptr;  // null: the master is the parameter (fp32)
  DType parameter_dtype = DType::kFloat32;
  // A split master (split_master.h), of bf16 parameters only, with the bits of a whole one: its
  // lower halves, updated in place, and the parameter before the update; null: where the new one is
  // written to.
  uint16_t* master_low = nullptr;
  const void* parameter_in = nullptr;
  int64_t count = 0;
};

}  // namespace ebb::optim
