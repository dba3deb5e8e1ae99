// The RAM that training was predicted to take in this process, and the RAM that it took.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/engine.h"

namespace ebb::gpt {

// Bytes of this process, and so of all ranks that are its threads.
struct ResidentRow {
  int64_t before_bytes = 0;     // before engines existed
  int64_t predicted_bytes = 0;  // it, and the memory that the engines take afterwards
  int64_t peak_bytes = 0;
};

class ResidentMemory {
 public:
  ResidentMemory();  // made before engines exist

  // Any thread. Adds what the engine's tables predict to be in RAM (the device's memory, too, if
  // that is the CPU's), and its plan.
  void Add(const Engine& engine, DeviceKind device);
  // The row now; any thread. Nothing if the system does not report resident memory.
  std::optional<ResidentRow> Row() const;

 private:
  std::optional<int64_t> before_bytes_;
  std::atomic<int64_t> engines_bytes_{0};
};

}  // namespace ebb::gpt
