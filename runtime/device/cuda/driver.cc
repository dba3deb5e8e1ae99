#include "ebb/runtime/device/cuda/driver.h"

#include <cuda_runtime_api.h>

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

}  // namespace ebb
