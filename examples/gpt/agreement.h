// Ranks exchange numbers and texts beside training, and compare their options.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "run.h"

namespace ebb::gpt {

// Collective: `bytes` of every rank into `all`, by rank. A rank waits for the others, at most
// `timeout_seconds`.
absl::Status GatherBytes(const World& world, const char* name, double timeout_seconds,
                         const void* own, int64_t bytes, void* all);
template <class T>
absl::StatusOr<std::vector<T>> GatherOnHost(const World& world, const char* name,
                                            double timeout_seconds, const T& own) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<size_t>(world.size()));
  const absl::Status gathered =
      GatherBytes(world, name, timeout_seconds, &own, sizeof(own), all.data());
  if (!gathered.ok()) return gathered;
  return all;
}

// Collective: rank 0's `text`, on every rank, up to kTextMax bytes of it and up to its first zero.
inline constexpr size_t kTextMax = 4095;
absl::StatusOr<std::string> TextOfFirst(const World& world, const std::string& text,
                                        double timeout_seconds);

// Collective: checks that all ranks were started with the same options, because each process has a
// command line of its own. With different options the ranks would wait for each other for ever, or
// train a mixture of two models. kFailedPrecondition, on every rank, names the first option that
// differs and the two ranks. The engine compares model and configuration itself.
absl::Status AgreeOnRun(const World& world, const Run& run);

}  // namespace ebb::gpt
