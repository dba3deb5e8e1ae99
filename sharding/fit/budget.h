// Lays the pools out within the limits of the config: ebb.device_memory, ebb.host_memory and
// DeepSpeed's pool sizes. States that would else be on NVMe use the rest of host_memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/passes/rows.h"

namespace ebb::sharding {

// ebb.host_memory makes sub-groups smaller, down to this many elements.
inline constexpr int64_t kSubGroupElementsMin = int64_t{1} << 16;
// A plan has operations for each sub-group. So a rank has at most this many, and one or two for
// each unit, even if the config asks for smaller ones. Slots of sub-groups are small beside so many
// elements.
inline constexpr int64_t kSubGroupsMax = int64_t{1} << 16;
// The least elements of a sub-group, where a rank updates so many in all.
int64_t SubGroupElementsLeast(int64_t elements);

// Chooses the placement (if `inputs` has none), parameter_slots and gather_slot_bytes. All states
// are in RAM if ebb.host_memory has room for them. Otherwise (with fills_host) RAM gets as many
// states as fit beside the staging memory. If even that is too much, staging is the smallest that
// there is (CheckBudget).
absl::StatusOr<Table> LayOutNearBudget(const RowInputs& inputs, const Config& config);

// Which given pool sizes (those other than the defaults) are no limits with an optimizer of the
// trainer's, and why; "": none.
std::string WhatOwnOptimizerOverrules(const Config& config);

// A table that needs no more than LayOutNearBudget's in any class. It comes without cuts of units
// into sub-groups and without trying one size of slots after another: to ask only whether a cap is
// exceeded.
Table LeastTable(const RowInputs& inputs, const Config& config);

// kResourceExhausted: a cap is exceeded. With names_classes the error names the bytes that each
// class needs.
absl::Status CheckBudget(const PoolBytes& pools, const Config& config, bool names_classes = true);

// Memory that a host has left for the pools of some of its ranks.
struct HostRoom {
  std::string of;             // of what: "this machine"
  int64_t ranks = 1;          // ranks that take their pools from it
  int64_t ram = 0, swap = 0;  // bytes
  // Pools on the device are in RAM too, without the workspace that the trainer never writes.
  bool holds_device = false;
  int64_t untouched = 0;  // bytes of a rank
  int64_t save = 0;       // bytes of a rank that a save takes beside the pools; 0: there is none

  int64_t bytes_of_rank() const { return (ram + swap) / ranks; }
  // The part of a rank's `of_rank` bytes that its process takes beside the pools: about 25 MiB for
  // programs and libraries, 10 MiB for each rank, and a plan.
  static int64_t BesidePools(int64_t of_rank) {
    return std::max(of_rank / 20, std::min(of_rank / 4, int64_t{40} << 20));
  }
};
// Bytes of a rank in RAM: its pools, the staging of calls for state, and the save.
int64_t BytesInRam(const PoolBytes& pools, const HostRoom& room);
// kResourceExhausted: the host cannot hold these bytes, not even with swap space. The error names
// the bytes that each class needs.
absl::Status CheckHostRoom(const PoolBytes& pools, const HostRoom& room);
// A sentence if the host can hold the pools, but perhaps only with swap space, or with less than
// BesidePools() for the rest, or without a save of `save` bytes; else "".
std::string HostRoomWarning(const PoolBytes& pools, const HostRoom& room, int64_t save);

// All classes of a rank.
int64_t DeviceBytes(const PoolBytes& pools);
int64_t HostBytes(const PoolBytes& pools);
int64_t DiskBytes(const PoolBytes& pools);
std::string SizeText(int64_t bytes);  // "7 bytes", "20.5 KiB", "7.1 MiB", "12.03 GiB"

}  // namespace ebb::sharding
