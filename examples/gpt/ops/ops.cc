#include "ops/ops.h"

#include "ebb/runtime/device/thread_team.h"
#include "ops/backends.h"

namespace ebb::gpt {

Processor::Processor(const Device& device)
    : Processor(device.kind(),
                device.kind() == DeviceKind::kCpu ? device.CallerStream().team().threads() : 1) {}

DType LogitsDtype(const Processor& processor, DType compute) {
  return processor.kind == DeviceKind::kCuda ? compute : DType::kFloat32;
}

int64_t ScratchBytes(const Processor& processor, DType compute, const OpsLimits& limits) {
  if (processor.kind == DeviceKind::kCuda) return CudaScratchBytes(compute, limits);
  return CpuScratchBytes(compute, processor.threads, limits);
}

absl::StatusOr<std::unique_ptr<Ops>> NewOps(const Device& device, DType compute,
                                            const OpsLimits& limits, std::span<std::byte> scratch) {
  if (device.kind() == DeviceKind::kCuda) return NewCudaOps(device, compute, limits, scratch);
  return NewCpuOps(compute, device.CallerStream().team().threads(), scratch);
}

}  // namespace ebb::gpt
