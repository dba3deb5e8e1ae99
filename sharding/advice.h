// What of a config would have to be different for its pools to stay within ebb.device_memory and
// ebb.host_memory. Nothing is guessed: each change is laid out, alone and, where none suffices, on
// top of those before it, and the one that fits is told.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/pools.h"

namespace ebb::sharding {

// `config` is resolved, and its pools exceed a cap. `lay_out`: as near to the caps as a changed
// config's can be; called some sixty times. For a message: which keys would fit, or with which
// least is needed.
std::string FindAdvice(const Config& config,
                       absl::FunctionRef<absl::StatusOr<Pools>(const Config& changed)> lay_out);

}  // namespace ebb::sharding
