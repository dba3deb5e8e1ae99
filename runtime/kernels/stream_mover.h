// A Mover on a stream of a CUDA device. It enqueues its work, and moves memory that the device can
// reach.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/kernels/mover.h"

namespace ebb {

struct ReduceArrays;
struct ReduceGrids;
struct ScaleArrays;

class StreamMover final : public Mover {
 public:
  // A kernel's parameters hold no more inputs of a reduction.
  static constexpr int kInputsMax = 64;

  // Loads the kernels onto a CUDA device. Movers of the device are made from the result.
  static absl::StatusOr<std::shared_ptr<const ReduceGrids>> Load(const Device& device);
  StreamMover(const Device& device, const ReduceGrids& grids, Stream& stream)
      : device_(device), grids_(grids), stream_(stream) {}

  void Copy(void* destination, const void* source, int64_t bytes, int64_t together_bytes) override;
  void Reduce(const Reduction& reduction, std::span<const void* const> inputs, void* destination,
              int64_t count, int64_t together_bytes) override;
  // Reduces any number of inputs in a row, each `stride` bytes after the one before. `stride`: a
  // multiple of 16.
  void ReduceRow(const Reduction& reduction, const void* first, int64_t stride, int inputs,
                 void* destination, int64_t count);

  // Multiplies the spans in place, in fp32 with one rounding: one kernel.
  void Scale(const ScaleArrays& arrays);

  // The first failure: the stream's, or that of a kernel that could not be launched. After a
  // failure nothing more is enqueued.
  absl::Status status() const { return failed_.ok() ? stream_.status() : failed_; }

 private:
  void Launch(const ReduceArrays& arrays);
  // `launch` returns CUDA's result.
  void Launch(absl::FunctionRef<int()> launch);

  const Device& device_;
  const ReduceGrids& grids_;
  Stream& stream_;
  absl::Status failed_;
};

}  // namespace ebb
