// Copies between memory of the CPU, spread over a team's threads.
#pragma once

#include <cstdint>

#include "ebb/runtime/device/thread_team.h"

namespace ebb {

// From this size on a copy goes past the caches: 27 instead of 20 GB/s (EPYC, 2 threads, 32 MiB
// each), because the lines that are written need not be read first. Smaller ones stay in the
// caches, where their reader finds them.
inline constexpr int64_t kStreamingCopyBytes = int64_t{16} << 20;

// `source` and `destination` do not overlap, or are the same. `together_bytes`: what the operation
// that this copy is a part of copies in all, if that is more than `bytes`; it decides whether the
// copy goes past the caches.
void CopyBytes(ThreadTeam& team, void* destination, const void* source, int64_t bytes,
               int64_t together_bytes = 0);
void ZeroBytes(ThreadTeam& team, void* destination, int64_t bytes);

}  // namespace ebb
