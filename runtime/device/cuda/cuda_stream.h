// A stream of CUDA behind the Stream interface.
//
// Copies, zeroing, waits and records are enqueued on it; kernels and libraries enqueue on view(). A
// host task is a host function in stream order (cudaLaunchHostFunc), for bookkeeping. CUDA may run
// the host functions of all streams on one thread. So a task makes no call of CUDA (failure_watch.h
// says why) and waits for no other stream.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/cuda/host_tasks.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

// Destroyed with its last owner, or borrowed.
using SharedCudaStream = std::shared_ptr<CUstream_st>;

// A stream of our own. It and the default stream never wait for each other.
absl::StatusOr<SharedCudaStream> NewCudaStream(const CudaContext& context, std::string_view name,
                                               StreamPriority priority = StreamPriority::kUsual);

class CudaStream : public StreamBackend {
 public:
  CudaStream(std::shared_ptr<CudaContext> context, std::shared_ptr<ThreadTeam> team,
             SharedCudaStream stream, std::string_view name, int tasks_max);
  ~CudaStream() override;

  void Enqueue(const Task& task) override;
  void Copy(void* destination, const void* source, int64_t bytes) override;
  void Zero(void* destination, int64_t bytes) override;
  void Wait(const EventBackend& event) override;
  void Record(EventBackend& event) override;
  void WaitIdle() override;
  ThreadTeam& team() override { return *team_; }
  StreamView view() const override { return {stream_.get()}; }
  absl::Status status() const override { return context_->status(); }

 private:
  bool Check(cudaError_t result, const char* call) { return context_->Check(result, call, name_); }

  const std::shared_ptr<CudaContext> context_;
  const std::shared_ptr<ThreadTeam> team_;
  const SharedCudaStream stream_;
  const std::string name_;  // "stream 'gather'"
  HostTasks tasks_;
};

}  // namespace ebb
