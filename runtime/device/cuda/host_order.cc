#include "ebb/runtime/device/cuda/host_order.h"

#include <atomic>
#include <cstdint>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/cuda/error.h"

namespace ebb {
namespace {

// Each count is on its own cache line: the device reads it while the host writes its neighbours.
struct alignas(64) Count {
  std::atomic<int64_t> passed{0};
};
static_assert(std::atomic<int64_t>::is_always_lock_free && sizeof(std::atomic<int64_t>) == 8,
              "the device reads the bare number");

constexpr int kCountsAtOnce = 64;  // a page of them

}  // namespace

absl::Status HostOrder::FindStreamWaitValue(const CudaContext& context) {
  if (stream_wait_value_ != nullptr) return absl::OkStatus();
  using DeviceGetAttribute = CUresult (*)(int*, CUdevice_attribute, CUdevice);
  const auto get_attribute =
      reinterpret_cast<DeviceGetAttribute>(DriverFunction("cuDeviceGetAttribute"));
  void* const wait = DriverFunction("cuStreamWaitValue64");
  int can_wait = 0;
  if (wait == nullptr || get_attribute == nullptr ||
      get_attribute(&can_wait, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
                    context.ordinal()) != CUDA_SUCCESS ||
      can_wait == 0) {
    return absl::UnimplementedError(absl::StrCat(
        context.name(),
        " cannot wait for streams of the host: cuStreamWaitValue64 is missing in its driver (CUDA "
        "12 or later has it) or does not work on this device"));
  }
  stream_wait_value_ = reinterpret_cast<StreamWaitValue>(wait);
  return absl::OkStatus();
}

absl::Status HostOrder::AddCounts(const CudaContext& context) {
  void* data = nullptr;
  EBB_RETURN_IF_ERROR(
      CudaStatus(cudaHostAlloc(&data, kCountsAtOnce * sizeof(Count),
                               cudaHostAllocPortable | cudaHostAllocMapped),
                 absl::StrCat("locking host memory for the host streams of ", context.name())));
  locked_.emplace_back(data, static_cast<int64_t>(kCountsAtOnce * sizeof(Count)), &FreeHostMemory,
                       context.ordinal());
  auto* const counts = static_cast<Count*>(data);
  for (int i = 0; i < kCountsAtOnce; ++i) records_->Add((::new (counts + i) Count)->passed);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CpuStream>> HostOrder::NewThread(const CudaContext& context,
                                                                std::string_view name,
                                                                int tasks_max,
                                                                std::shared_ptr<ThreadTeam> team) {
  const std::scoped_lock lock(mutex_);
  const CudaCurrent current(context.ordinal());
  EBB_RETURN_IF_ERROR(FindStreamWaitValue(context));
  if (!records_->HasFree()) EBB_RETURN_IF_ERROR(AddCounts(context));
  return CpuStream::Create(name, tasks_max, std::move(team), records_);
}

cudaError_t HostOrder::EnqueueWait(cudaStream_t stream, const CpuEvent::Place& place) const {
  const CUresult result =
      stream_wait_value_(stream, reinterpret_cast<CUdeviceptr>(&place.tickets->passed()),
                         static_cast<cuuint64_t>(place.ticket), CU_STREAM_WAIT_VALUE_GEQ);
  return static_cast<cudaError_t>(result);  // both enums have the same numbers
}

}  // namespace ebb
