// Counts every call of operator new of the program that links it, for tests of code that must not
// allocate.
#pragma once

#include <cstdint>

namespace ebb::testing {

int64_t Allocations();

}  // namespace ebb::testing
