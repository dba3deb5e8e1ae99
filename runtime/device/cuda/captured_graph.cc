#include "ebb/runtime/device/cuda/captured_graph.h"

#include <memory>
#include <type_traits>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/cuda/error.h"

namespace ebb {
namespace {

using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, decltype(&cudaGraphDestroy)>;

// CudaStatus, but clears CUDA's last error, because the caller handles it.
absl::Status Checked(cudaError_t result, const char* what) {
  if (result != cudaSuccess) cudaGetLastError();
  return CudaStatus(result, what);
}

}  // namespace

absl::StatusOr<CapturedGraph> CapturedGraph::Capture(int device, cudaStream_t stream,
                                                     absl::FunctionRef<absl::Status()> enqueue) {
  const CudaCurrent current(device);
  EBB_RETURN_IF_ERROR(Checked(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                              "beginning to capture a graph"));
  const absl::Status enqueued = enqueue();
  cudaGraph_t captured = nullptr;
  const absl::Status ended = Checked(cudaStreamEndCapture(stream, &captured), "capturing a graph");
  const Graph graph(captured, &cudaGraphDestroy);
  EBB_RETURN_IF_ERROR(enqueued);
  EBB_RETURN_IF_ERROR(ended);

  cudaGraphExec_t native = nullptr;
  EBB_RETURN_IF_ERROR(
      Checked(cudaGraphInstantiate(&native, graph.get(), 0), "instantiating a graph"));
  CapturedGraph made(device, native);
  // Uploaded here, where the caller can handle an error, and not in the first launch.
  EBB_RETURN_IF_ERROR(Checked(cudaGraphUpload(native, stream), "uploading a graph"));
  return made;
}

CapturedGraph::~CapturedGraph() {
  if (native_ == nullptr) return;
  const CudaCurrent current(device_);
  cudaGraphExecDestroy(native_);
}

}  // namespace ebb
