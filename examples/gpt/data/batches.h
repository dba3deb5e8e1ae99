// The micro-batches of a step on their way from the text to the device.
//
//      text -> locked host memory -> (copied in stream order) -> memory of the device
//
// Host memory has room for two steps, so the host can fill the micro-batches of the next step while
// the device still works on this step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"
#include "model/layers.h"

namespace ebb::gpt {

class Batches {
 public:
  // Room for the `count` micro-batches of a step, of up to `rows` tokens each. `memory` is device
  // memory of DeviceBytes, and outlives them.
  static int64_t DeviceBytes(int64_t count, int64_t rows);
  static absl::StatusOr<Batches> Create(const Device& device, int64_t count, int64_t rows,
                                        std::span<std::byte> memory);

  // Where the host writes micro-batch `index`, `rows` of both arrays. Waits until the micro-batch
  // of the step before the last has been copied.
  struct HostArrays {
    std::span<int32_t> tokens, targets;
  };
  HostArrays Fill(int64_t index);
  // Enqueues the copy of its first sequences * length rows, on the device's compute stream.
  const Batch& Load(int64_t index, int64_t sequences, int64_t length);
  // The micro-batch that was loaded last for `index`.
  const Batch& batch(int64_t index) const { return batches_[index]; }

 private:
  Batches(const Device& device, int64_t rows, std::span<std::byte> memory)
      : stream_(device.CallerStream()), rows_(rows), memory_(memory) {}
  size_t SlotOf(int64_t index) const { return 2 * static_cast<size_t>(index) + parity_[index]; }

  Stream stream_;
  int64_t rows_;
  std::span<std::byte> memory_;
  Buffer host_;                  // by slot: a micro-batch has two, used in turn
  std::vector<Event> copied_;    // by slot
  std::vector<uint8_t> parity_;  // by micro-batch
  std::vector<Batch> batches_;
};

}  // namespace ebb::gpt
