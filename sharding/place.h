// Addresses in a rank's pools, and moves between them: the bytes that an offloaded step carries
// from tier to tier, as data. The same on every rank.
#pragma once

#include <cstdint>
#include <utility>

#include "ebb/runtime/base/io_backend.h"
#include "ebb/sharding/state.h"

namespace ebb::sharding {

// A byte of one pool. kNvme has two pools, each a file of the rank's: one of parameters
// (kParameter), one of all else.
struct Place {
  Tier tier = Tier::kDevice;
  StateClass pool{};
  bool of_secondary = false;  // per_slice: of hpZ's secondary copies
  int row = -1;               // the array (Table::rows); -1: of a control cell, or of a call
  int64_t offset = 0;
  // Plus this times the number of the rank's slice, or of its part of a secondary copy.
  int64_t per_slice = 0;

  Place Plus(int64_t bytes) const {
    Place further = *this;
    further.offset += bytes;
    return further;
  }
  friend bool operator==(const Place&, const Place&) = default;
  template <class H>
  friend H AbslHashValue(H hash, const Place& place) {
    return H::combine(std::move(hash), place.tier, place.pool, place.of_secondary, place.row,
                      place.offset, place.per_slice);
  }
};

struct Move {
  StateClass state{};  // its class, wherever it lies meanwhile
  Place from, to;
  int64_t bytes = 0;
};

// Transfers with the swap file start and end at multiples of this, in the file and in memory.
inline constexpr int64_t kSwapAlignment = kDiskAlignment;
constexpr int64_t SwapAligned(int64_t bytes) {
  return (bytes + kSwapAlignment - 1) / kSwapAlignment * kSwapAlignment;
}

}  // namespace ebb::sharding
