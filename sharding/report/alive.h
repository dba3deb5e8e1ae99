// The bytes of a tier that are in use at each instruction: written before and read again later.
// Pools hold memory all the time. These numbers show the instruction at which most of it is in use,
// by class.
//
//   a gathered unit      gather |=====| its last kernels     its slot then holds another unit
//   a master             |===========================|       in use since the step before, if a
//                                                            step reads it and has not written it
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ebb/sharding/instructions.h"

namespace ebb::sharding {

using ClassBytes = std::array<int64_t, kStateClasses>;

// By instruction of a step between others like it, on the rank that has the first slices. The
// workspace does not count, because no instruction names it.
std::vector<ClassBytes> AliveBytes(const Fragment& fragment, Tier tier);

}  // namespace ebb::sharding
