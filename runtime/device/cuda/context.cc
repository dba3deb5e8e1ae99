#include "ebb/runtime/device/cuda/context.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/cuda/error.h"

namespace ebb {

absl::Status CudaContext::status() const {
  const std::scoped_lock lock(mutex_);
  return status_;
}

void CudaContext::Fail(cudaError_t result, const char* call, std::string_view stream) {
  // Otherwise the next one who asks CUDA for the last error, after a kernel's launch say, is blamed.
  cudaGetLastError();
  const std::scoped_lock lock(mutex_);
  if (!status_.ok()) return;
  status_ = CudaStatus(
      result,
      absl::StrCat(call, " on ", absl::string_view(stream.data(), stream.size()), " of ", name_));
  failed_.store(true, std::memory_order_release);
}

}  // namespace ebb
