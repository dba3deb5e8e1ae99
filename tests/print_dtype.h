// How GoogleTest prints a dtype: by its name, as in the names of tests.
#pragma once

#include <ostream>

#include "ebb/runtime/base/dtype.h"

namespace ebb {

inline void PrintTo(DType dtype, std::ostream* out) {
  *out << Name(dtype);
}

}  // namespace ebb
