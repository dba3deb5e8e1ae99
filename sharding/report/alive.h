// Which bytes of a tier are in use when: what was written and will be read again. Pools hold memory for the whole
// time; this says at which instruction most of it is needed, and of which classes that is.
//
//   a gathered unit      gather |=====| its last kernels         between them its slot holds a unit, or another one
//   a master             |===========================|           what a step reads that it has not written is in use
//                                                                from the step before on
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ebb/sharding/instructions.h"

namespace ebb::sharding {

using ClassBytes = std::array<int64_t, kStateClasses>;

// By instruction of a step that follows and is followed by others like it, on the rank that has the first slices. Of
// the workspace, which no instruction names, there is nothing.
std::vector<ClassBytes> AliveBytes(const Fragment& fragment, Tier tier);

}  // namespace ebb::sharding
