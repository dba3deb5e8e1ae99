// The fp32 master as its bf16 parameter plus 16 bits, so that no bit is stored twice.
//
//   master     [ sign, exponent, 7 bits | low 16 bits ]      bits of the fp32 number
//   parameter  the upper half, plus one if the lower half is 0x8000 or more: the cast of the master
//              to a parameter (half away from zero: add 0x8000, cut)
//   rebuilt    (parameter << 16) + low as a signed 16-bit number, modulo 2^32
//
// The rebuilt bits are the master's for every finite number, including zeros and subnormals of both
// signs; for infinities; and for numbers near infinity with an infinite parameter. A NaN stays a
// NaN, with another payload, because the cast makes it quiet.
#pragma once

#include <bit>
#include <cstdint>

#include "ebb/optim/update_arrays.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

// For one element; its parameter is RoundHalfAway(master).
constexpr uint16_t LowHalf(float master) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(master));
}
constexpr float JoinMaster(BFloat16 parameter, uint16_t low) {
  const auto carry = static_cast<uint32_t>(static_cast<int16_t>(low));
  return std::bit_cast<float>((uint32_t{parameter.bits} << 16) + carry);
}

// Arrays that do not overlap. 8 bytes moved per element.
void Split(ThreadTeam& team, const float* master, BFloat16* parameter, uint16_t* low,
           int64_t count);
void Join(ThreadTeam& team, const BFloat16* parameter, const uint16_t* low, float* master,
          int64_t count);

// A master that is kept in another form, for conversion to and from fp32 around a trainer's own
// optimizer. The arrays do not overlap.
struct MasterArrays {
  float* master = nullptr;
  BFloat16* parameter = nullptr;
  uint16_t* low = nullptr;  // a split master's lower halves; null: the parameter is the master
  int64_t count = 0;
  // The place of the first element and of the step, for random bits if the parameter is the master.
  RoundingPlace rounding = {};
  int64_t step = 0;
};

// Rebuilds the master: 8 bytes moved per element for a split one, otherwise 6.
void LoadMaster(ThreadTeam& team, const MasterArrays& arrays);
// The reverse: Split or RoundStochastically.
void StoreMaster(ThreadTeam& team, const MasterArrays& arrays);

}  // namespace ebb::optim
