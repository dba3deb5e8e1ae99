#include "ebb/runtime/device/cuda/context.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/cuda/error.h"

namespace ebb {

void* DriverFunction(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  constexpr int kDriverVersion = 12000;
  const cudaError_t result =
      cudaGetDriverEntryPointByVersion(name, &function, kDriverVersion, cudaEnableDefault, &found);
#else
  const cudaError_t result = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  if (result != cudaSuccess) cudaGetLastError();  // handled here
  return result == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}

bool HasCudaContext(int ordinal) {
  using GetState = CUresult (*)(CUdevice, unsigned*, int*);
  static const auto get_state =
      reinterpret_cast<GetState>(DriverFunction("cuDevicePrimaryCtxGetState"));
  unsigned flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(ordinal, &flags, &active) == CUDA_SUCCESS && active != 0;
}

void FreeHostMemory(void* data, int64_t, int device) {
  const CudaCurrent current(device);
  if (cudaFreeHost(data) != cudaSuccess)
    cudaGetLastError();  // an earlier error, which status() reports
}

absl::Status CudaContext::status() const {
  const std::scoped_lock lock(mutex_);
  return status_;
}

void CudaContext::Fail(cudaError_t result, const char* call, std::string_view stream) {
  // Otherwise the next caller that asks CUDA for the last error, after a kernel's launch for
  // example, gets this one.
  cudaGetLastError();
  const std::scoped_lock lock(mutex_);
  if (!status_.ok()) return;
  status_ = CudaStatus(
      result,
      absl::StrCat(call, " on ", absl::string_view(stream.data(), stream.size()), " of ", name_));
  failed_.store(true, std::memory_order_release);
}

}  // namespace ebb
