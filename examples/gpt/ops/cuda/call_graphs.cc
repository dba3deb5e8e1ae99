#include "ops/cuda/call_graphs.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/cuda/error.h"
#include "ebb/runtime/device/driver_memory.h"
#include "ebb/runtime/trace/log.h"

namespace ebb::gpt::cuda {

absl::Status CallGraphs::Run(std::span<const uint64_t> key,
                             absl::FunctionRef<absl::Status()> launch) {
  const auto found = graphs_.find(key);
  if (found == graphs_.end()) {
    if (static_cast<int64_t>(graphs_.size()) < use_.most)
      graphs_.emplace(std::vector<uint64_t>(key.begin(), key.end()), std::nullopt);
    return launch();
  }
  std::optional<CapturedGraph>& graph = found->second;
  if (!graph) {
    if (!use_.given_up.empty()) return launch();
    const DriverMemory::Measured measured(device_);
    absl::StatusOr<CapturedGraph> captured =
        CapturedGraph::Capture(device_.ordinal(), stream_, launch);
    if (!captured.ok()) {
      GiveUp(captured.status());
      return launch();  // an error that is not the capture's shows again
    }
    graph = *std::move(captured);
    ++use_.kept;
  }
  const cudaError_t launched = graph->Launch(stream_);
  if (launched != cudaSuccess) {
    cudaGetLastError();  // handled here
    return CudaStatus(launched, absl::StrCat("launching a graph on ", device_.description()));
  }
  ++use_.launches;
  return absl::OkStatus();
}

void CallGraphs::GiveUp(const absl::Status& why) {
  use_.given_up = std::string(why.message());
  LogWarning(
      absl::StrCat("no CUDA graphs on ", device_.description(),
                   ", so kernels are launched one by one, with the same results: ", use_.given_up));
}

}  // namespace ebb::gpt::cuda
