// A CUDA device behind the Device interface: memory from cudaMalloc, streams and events of CUDA,
// and host threads for work on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/cuda/cuda_stream.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class CudaDevice : public DeviceBackend {
 public:
  // `compute`: the stream that CallerStream() returns, borrowed; null: a stream of our own.
  static absl::StatusOr<std::shared_ptr<CudaDevice>> Create(int ordinal, cudaStream_t compute);

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  int ordinal() const override { return context_->ordinal(); }
  uint64_t identity() const override { return identity_; }
  std::string description() const override { return context_->name(); }
  absl::Status status() const override { return context_->status(); }
  std::optional<int64_t> free_bytes() const override;
  DriverMemory* driver_memory() override { return &driver_memory_; }
  absl::StatusOr<std::unique_ptr<StreamBackend>> NewStream(std::string_view name,
                                                           int tasks_max) override;
  absl::StatusOr<std::unique_ptr<StreamBackend>> NewStreamOf(StreamPriority priority,
                                                             std::string_view name,
                                                             int tasks_max) override;
  absl::StatusOr<std::unique_ptr<StreamBackend>> NewHostStream(std::string_view name,
                                                               int tasks_max) override;
  std::unique_ptr<StreamBackend> CallerStream() override;
  absl::StatusOr<std::unique_ptr<EventBackend>> NewEvent() override;
  absl::StatusOr<std::unique_ptr<EventBackend>> NewAwaitedEvent() override;
  absl::StatusOr<std::unique_ptr<SpanClock>> NewSpanClock() override;
  absl::StatusOr<Buffer> Allocate(int64_t bytes, std::string_view what) override;
  absl::StatusOr<Buffer> AllocateShared(int64_t bytes, std::string_view what) override;
  absl::StatusOr<LockedRange> LockHostMemory(std::span<std::byte> memory,
                                             std::string_view what) override;

  // For code that launches our own kernels on its streams: it notes a launch that failed here.
  const std::shared_ptr<CudaContext>& context() const { return context_; }

 private:
  CudaDevice(std::shared_ptr<CudaContext> context, uint64_t identity);
  absl::Status MakeStreams(cudaStream_t compute);

  const std::shared_ptr<CudaContext> context_;
  const uint64_t identity_;
  const std::shared_ptr<ThreadTeam> team_;
  DriverMemory driver_memory_;
  SharedCudaStream compute_;
  SharedCudaStream fill_;  // zeroes new memory
};

}  // namespace ebb
