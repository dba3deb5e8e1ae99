// Classes of state, and the rows of the tables that count them by the tier they live in.
#pragma once

#include <cstdint>
#include <string_view>

#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/base/tier.h"

namespace ebb {

enum class StateClass : uint8_t {
  kParameter,   // parameters that are kept, in the compute dtype
  kMaster,      // fp32 masters; none where parameters (fp32, stochastic) are masters
  kGradient,    // whole gradients of units in use and the reduced shards
  kOptimizer,   // optimizer states
  kActivation,  // boundary activations and their gradients
  kGather,      // whole units, gathered for use
  kSecondary,   // parts of units for gathers within a group of ranks (ZeRO++'s hpZ)
  kStaging,     // casts before a reduction, norms, records that ranks exchange
  kWorkspace,   // the trainer's scratch
  // Beside the classes of a plan: device memory of the driver and libraries, which is measured
  // (Device::driver_bytes). There is none where the device's memory is the host's.
  kDriver,
  // Values that the host and the streams exchange in a step (ControlCells). No table counts them.
  kControl,
};
inline constexpr int kStateClasses = 9;  // the classes that a plan lays out
enum class Direction : uint8_t { kRead, kWrite };

// The spelling of every report: "parameter", "master", ...
constexpr std::string_view Name(StateClass state) {
  constexpr std::string_view kNames[kStateClasses + 2] = {
      "parameter", "master",  "gradient",  "optimizer", "activation", "gather",
      "secondary", "staging", "workspace", "driver",    "control"};
  return kNames[static_cast<int>(state)];
}

// "read", towards the device, or "write".
constexpr std::string_view Name(Direction direction) {
  return direction == Direction::kRead ? "read" : "write";
}

// Bytes of one class in one tier on one rank. Nothing is predicted of kDriver.
struct MemoryRow {
  StateClass state{};
  Tier tier{};
  uint64_t predicted_bytes = 0, current_bytes = 0, peak_bytes = 0;
};

// Bytes of one class that a step moves between a tier and the one above it.
struct TrafficRow {
  StateClass state{};
  Tier tier{};
  Direction direction{};
  uint64_t predicted_bytes = 0, bytes = 0;
};

// Bytes that a step's collectives move from or to other ranks.
struct CommunicationRow {
  // "gather", "gather_secondary", "reduce", "gather_gradient", "exchange". And "tensor", of the
  // trainer's kernels (TensorAxis), where they move or predict any (Visit::forward_tensor_bytes).
  NameView operation;
  uint64_t predicted_bytes = 0, bytes = 0;
};

}  // namespace ebb
