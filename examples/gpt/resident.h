// What training should take of this process's RAM, beside what it took.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/engine.h"

namespace ebb::gpt {

// Bytes, of this process: of all ranks that are its threads.
struct ResidentRow {
  int64_t before_bytes = 0;     // before there were engines
  int64_t predicted_bytes = 0;  // that, and what they then take
  int64_t peak_bytes = 0;
};

class ResidentMemory {
 public:
  ResidentMemory();  // before there are engines

  // Any thread. What the engine's tables predict to be in RAM (of the device's memory where that is
  // the CPU's), and its plan.
  void Add(const Engine& engine, DeviceKind device);
  // As of now; any thread. Nothing where the system does not say what is resident.
  std::optional<ResidentRow> Row() const;

 private:
  std::optional<int64_t> before_bytes_;
  std::atomic<int64_t> engines_bytes_{0};
};

}  // namespace ebb::gpt
