// Launches repeated sequences of calls with the same arguments as CUDA graphs.
//
//   first time    launched one by one: cuBLASLt chooses its algorithms then, and loads its kernels
//   second time   captured, and the graph launched
//   from then on  the graph launched
//
// A key stands for all arguments of a sequence. A key is never evicted: the addresses come from an
// engine's plan, so a step uses all keys in the same order, and an evicted key would be the next
// one needed. If there is no place for a key, its calls are always launched one by one.
//
// If a sequence cannot be captured, this is logged once, and no other sequence is captured.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/device/cuda/captured_graph.h"
#include "ebb/runtime/device/device.h"
#include "ops/ops.h"

namespace ebb::gpt::cuda {

class CallGraphs {
 public:
  // For sequences on `stream` of `device`, which outlives them. `most`: how many.
  CallGraphs(const Device& device, cudaStream_t stream, int64_t most)
      : device_(device), stream_(stream) {
    use_.most = most;
  }

  // Call it with the device current. `launch` enqueues the sequence. It may be called twice: under
  // capture and, if that fails, again. The Status is that of the launches.
  absl::Status Run(std::span<const uint64_t> key, absl::FunctionRef<absl::Status()> launch);
  const GraphUse& use() const { return use_; }

 private:
  struct Less {
    using is_transparent = void;
    bool operator()(std::span<const uint64_t> a, std::span<const uint64_t> b) const {
      return std::ranges::lexicographical_compare(a, b);
    }
  };
  void GiveUp(const absl::Status& why);

  const Device device_;
  const cudaStream_t stream_;
  std::map<std::vector<uint64_t>, std::optional<CapturedGraph>, Less> graphs_;
  GraphUse use_;
};

}  // namespace ebb::gpt::cuda
