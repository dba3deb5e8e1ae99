// The arrays of one optimizer step (update.h) over one contiguous run of a shard.
#pragma once

#include <cstdint>

#include "ebb/runtime/config/dtype.h"

namespace ebb::optim {

inline constexpr int kStatesMax = 3;

// What an update reads as the master, and writes as it.
enum class MasterForm : uint8_t {
  kWhole,     // fp32, beside the parameter
  kSplit,     // bf16 parameter and 16 bits more (split_master.h)
  kParameter  // the bf16 parameter alone, rounded stochastically (stochastic_rounding.h)
};

// Where an element is, for its random bits.
struct RoundingPlace {
  uint64_t unit = 0;  // a hash of its name
  int64_t index = 0;  // in the unit's flat trainable section
};

struct UpdateArrays {
  // Not given: a split master where master_low is, else the parameter is the master.
  float* master = nullptr;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::kFloat32;
  float* states[kStatesMax] = {};
  void* parameter = nullptr;  // null: the master is the parameter (fp32)
  DType parameter_dtype = DType::kFloat32;
  // A split master, of bf16 parameters only, with the bits of a whole one: its lower halves, updated
  // in place.
  uint16_t* master_low = nullptr;
  // The parameter before the update, where it is read; null: where the new one is written to.
  const void* parameter_in = nullptr;
  RoundingPlace rounding = {};  // of the first element; of parameters that are the master
  int64_t count = 0;

  MasterForm form() const {
    return master_low != nullptr ? MasterForm::kSplit
           : master != nullptr   ? MasterForm::kWhole
                                 : MasterForm::kParameter;
  }
};

}  // namespace ebb::optim
