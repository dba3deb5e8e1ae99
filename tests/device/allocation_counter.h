// Counts every call of operator new of the program that links it: what must not allocate is tested
// by counting.
#pragma once

#include <cstdint>

namespace ebb::testing {

int64_t Allocations();

}  // namespace ebb::testing
