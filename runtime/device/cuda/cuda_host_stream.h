// A host stream of a CUDA device: the CPU's stream, a thread with a queue, ordered with the
// device's streams as host_order.h says.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/device/cpu/cpu_device.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/cuda/cuda_stream.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class CudaHostStream : public StreamBackend {
 public:
  static absl::StatusOr<std::unique_ptr<CudaHostStream>> Create(
      std::shared_ptr<CudaContext> context, std::shared_ptr<ThreadTeam> team, std::string_view name,
      int tasks_max);
  ~CudaHostStream() override;

  void Enqueue(const Task& task) override { thread_->Enqueue(task); }
  void Copy(void* destination, const void* source, int64_t bytes) override;
  void Zero(void* destination, int64_t bytes) override;
  void Wait(const EventBackend& event) override;
  void Record(EventBackend& event) override;
  void WaitIdle() override;
  ThreadTeam& team() override { return thread_->team(); }
  StreamView view() const override { return {}; }
  absl::Status status() const override { return context_->status(); }

  // Represents this stream where order is checked (order_observer.h).
  cudaStream_t crossing() const { return crossing_.get(); }

 private:
  CudaHostStream(std::shared_ptr<CudaContext> context, SharedCudaStream crossing,
                 std::unique_ptr<CpuStream> thread, std::string_view name);
  bool Check(cudaError_t result, const char* call) { return context_->Check(result, call, name_); }
  void WaitForDevice(cudaEvent_t event);
  // Called by the thread; makes no call of CUDA (failure_watch.h). Waits until `ticket` has
  // crossed, or the device has failed.
  void AwaitCrossing(int64_t ticket);

  const std::shared_ptr<CudaContext> context_;
  const std::string name_;
  Tickets* const crossed_;
  SharedCudaStream crossing_;
  std::unique_ptr<CpuStream> thread_;
};

}  // namespace ebb
