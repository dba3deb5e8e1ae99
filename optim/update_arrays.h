// The arrays of one optimizer step (update.h) over one contiguous run of a shard.
#pragma once

#include <cstdint>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/base/encoding.h"

namespace ebb::optim {

inline constexpr int kStatesMax = 3;

// The form in which an update reads and writes the master.
enum class MasterForm : uint8_t {
  kWhole,     // fp32, beside the parameter
  kSplit,     // bf16 parameter plus 16 bits (split_master.h)
  kParameter  // the bf16 parameter alone, rounded stochastically (stochastic_rounding.h)
};

// The place of an element, for its random bits.
struct RoundingPlace {
  uint64_t unit = 0;  // a hash of the unit's name
  int64_t index = 0;  // in the unit's flat trainable section
};

// A state of the elements: its codes and, if it is in blocks, their scales (block_codes.h).
struct StateArray {
  void* codes = nullptr;
  float* scales = nullptr;
  Encoding encoding = DType::kFloat32;

  constexpr bool is_fp32() const { return encoding == Encoding(DType::kFloat32); }
  // If it is fp32.
  float* numbers() const { return static_cast<float*>(codes); }
};

struct UpdateArrays {
  // Null: a split master if master_low is set, otherwise the parameter is the master.
  float* master = nullptr;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::kFloat32;
  // Each has an encoding of its own: fp32, bf16, kDynamic8 or kDynamicUnsigned8.
  StateArray states[kStatesMax] = {{}, {}, {}};
  bool round_states_stochastically = false;  // those of bf16; otherwise to nearest, ties to even
  void* parameter = nullptr;                 // null: the master is the parameter (fp32)
  DType parameter_dtype = DType::kFloat32;
  // A split master's lower halves, updated in place; for bf16 parameters only. The bits are a whole
  // master's.
  uint16_t* master_low = nullptr;
  // The place of the old parameter, if a rule reads it. Null: the place of the new one.
  const void* parameter_in = nullptr;
  // The first element's; for parameters that are the master, and for states of bf16.
  RoundingPlace rounding = {};
  int64_t count = 0;

  MasterForm form() const {
    return master_low != nullptr ? MasterForm::kSplit
           : master != nullptr   ? MasterForm::kWhole
                                 : MasterForm::kParameter;
  }
};

}  // namespace ebb::optim
