#include "ebb/runtime/device/cuda/error.h"

#include "absl/strings/str_cat.h"

namespace ebb {
namespace {

absl::StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::StatusCode::kResourceExhausted;
    case cudaErrorInitializationError:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
    case cudaErrorDevicesUnavailable:
    case cudaErrorECCUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorNvlinkUncorrectable:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kInternal;
  }
}

std::string_view Advice(cudaError_t error, CudaMemory memory) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      if (memory == CudaMemory::kLockedOfHost) {
        return "; free memory of the host, let the container or virtual machine lock more, or keep "
               "less in host memory (ebb.host_memory, nvme)";
      }
      return "; use smaller batches, a higher ZeRO stage, or keep more state in host memory";
    case cudaErrorDevicesUnavailable:
      return "; another process has the device to itself (nvidia-smi shows which)";
    case cudaErrorECCUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorNvlinkUncorrectable:
      return "; the hardware failed: use another device, nothing computed here can be trusted";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorIllegalInstruction:
    case cudaErrorAssert:
      return "; a kernel went wrong at some point before this call: run the program under "
             "compute-sanitizer. This process cannot use the device any more";
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureUnsupported:
      return "; the stream is being captured into a graph, where this cannot be done";
    default:
      return "";
  }
}

}  // namespace

absl::Status CudaStatus(cudaError_t error, std::string_view what, CudaMemory memory) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string_view advice = Advice(error, memory);
  return absl::Status(CodeOf(error), absl::StrCat(absl::string_view(what.data(), what.size()),
                                                  " failed: ", cudaGetErrorString(error), " (",
                                                  cudaGetErrorName(error), ")",
                                                  absl::string_view(advice.data(), advice.size())));
}

}  // namespace ebb
