// The overrides that a test sets. Do not change them while engines or shard files are being made.
#pragma once

#include "ebb/offload/overrides.h"

namespace ebb::testing {

OffloadOverrides& TestOverrides();  // of the process

}  // namespace ebb::testing
