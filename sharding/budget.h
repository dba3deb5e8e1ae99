// Lays the pools out so that they stay within what the config grants: ebb.device_memory,
// ebb.host_memory and DeepSpeed's pool sizes, which are upper limits. What host_memory leaves is
// used for states that would else be on NVMe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/pools.h"

namespace ebb::sharding {

// To this many elements sub-groups are made smaller where ebb.host_memory asks for it.
inline constexpr int64_t kSubGroupElementsMin = int64_t{1} << 16;
// A plan has operations for each sub-group, so a rank's are at most so many and one or two a unit,
// whatever asks for smaller ones: what that costs in slots is nothing beside so many elements.
inline constexpr int64_t kSubGroupsMax = int64_t{1} << 16;
// Of so many elements, each sub-group's at least.
int64_t SubGroupElementsLeast(int64_t elements);

// Homes, if `inputs` has none, parameter_slots and gather_slot_bytes of `inputs` are chosen here: all states in RAM if
// ebb.host_memory has room for them, else (with fills_host) as many as it has room for beside staging,
// which is the smallest there is where even that is too much (CheckBudget).
absl::StatusOr<Pools> LayOutNearBudget(const PoolInputs& inputs, const Config& config);

// Which of the pool sizes that this config gives (those that are not the defaults) are no limits where
// the optimizer is the trainer's, and why; "": none.
std::string WhatOwnOptimizerOverrules(const Config& config);

// Pools that need no more than LayOutNearBudget's in any class. They come without cuts of units
// into sub-groups and without trying one size of slots after another: to ask only whether a cap is
// exceeded.
Pools LeastPools(const PoolInputs& inputs, const Config& config);

// kResourceExhausted: a cap is exceeded, and (names_classes) which class needs how much.
absl::Status CheckBudget(const Pools& pools, const Config& config, bool names_classes = true);

// What a host has left for the pools of some of its ranks.
struct HostRoom {
  std::string of;             // of what: "this machine"
  int64_t ranks = 1;          // that take their pools from it
  int64_t ram = 0, swap = 0;  // bytes
  // Pools on the device are in RAM too, but for what the trainer leaves untouched of its workspace.
  bool holds_device = false;
  int64_t untouched = 0;  // bytes of a rank

  int64_t bytes_of_rank() const { return (ram + swap) / ranks; }
  // Of so many bytes of a rank, what is left to the rest of its process: some 25 MiB of programs and
  // libraries, 10 a rank, and a plan.
  static int64_t BesidePools(int64_t of_rank) {
    return std::max(of_rank / 20, std::min(of_rank / 4, int64_t{40} << 20));
  }
};
// Bytes of a rank's pools that are in RAM.
int64_t BytesInRam(const Pools& pools, const HostRoom& room);
// kResourceExhausted: the pools cannot be there, not even with swap space, and which class needs how
// much.
absl::Status CheckHostRoom(const Pools& pools, const HostRoom& room);
// A sentence where they can, but perhaps only with swap space or less than BesidePools() for the rest;
// else "".
std::string HostRoomWarning(const Pools& pools, const HostRoom& room);

// Of a rank, all classes.
int64_t DeviceBytes(const Pools& pools);
int64_t HostBytes(const Pools& pools);
std::string Megabytes(int64_t bytes);  // "7.1 MiB"; of less than a tenth "20.5 KiB", "7 bytes"

}  // namespace ebb::sharding
