#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/cuda/captured_graph.h"
#include "ebb/runtime/device/cuda/current_device.h"
#include "ebb/runtime/device/cuda/error.h"
#include "ebb/runtime/device/driver_memory.h"
#include "ebb/runtime/trace/log.h"
#include "ops/backends.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/matmul.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

// The bytes of each op's scratch. Ops run one after the other, so all use the same memory.
struct ScratchOf {
  ScratchOf(DType compute, const OpsLimits& limits)
      : matmul(cuda::Matmul::ScratchBytes(compute, limits)),
        norm(cuda::NormBackwardPartials(limits.rows, limits.width) * int64_t{sizeof(float)}),
        attention(limits.tokens == 0 ? 0
                                     : cuda::AttentionScratchBytes(
                                           (limits.rows + limits.tokens - 1) / limits.tokens,
                                           limits.tokens, limits.heads)),
        embedding(cuda::EmbedBackwardInts(limits.rows, limits.vocabulary) *
                  int64_t{sizeof(int32_t)}),
        sums(limits.is_cut
                 ? cuda::ColumnSumsParts(limits.rows) * limits.width * int64_t{sizeof(float)}
                 : 0) {}
  int64_t all() const { return std::max({matmul, norm, attention, embedding, sums}); }

  int64_t matmul, norm, attention, embedding, sums;
};

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
class CallGraphs {
 public:
  // For sequences on `stream` of `device`, which outlives them. `most`: how many.
  CallGraphs(const Device& device, cudaStream_t stream, int64_t most)
      : device_(device), stream_(stream) {
    use_.most = most;
  }

  // Call it with the device current. `launch` enqueues the sequence. It may be called twice: under
  // capture and, if that fails, again. The Status is that of the launches.
  absl::Status Run(std::span<const uint64_t> key, absl::FunctionRef<absl::Status()> launch) {
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
  const GraphUse& use() const { return use_; }

 private:
  struct Less {
    using is_transparent = void;
    bool operator()(std::span<const uint64_t> a, std::span<const uint64_t> b) const {
      return std::ranges::lexicographical_compare(a, b);
    }
  };
  void GiveUp(const absl::Status& why) {
    use_.given_up = std::string(why.message());
    LogWarning(absl::StrCat(
        "no CUDA graphs on ", device_.description(),
        ", so kernels are launched one by one, with the same results: ", use_.given_up));
  }

  const Device device_;
  const cudaStream_t stream_;
  std::map<std::vector<uint64_t>, std::optional<CapturedGraph>, Less> graphs_;
  GraphUse use_;
};

class CudaOps final : public Ops {
 public:
  CudaOps(const Device& device, DType compute, std::span<std::byte> scratch,
          std::unique_ptr<cuda::Matmul> matmul)
      : device_(device),
        stream_(static_cast<cudaStream_t>(device.CallerStream().view().native)),
        compute_(compute),
        scratch_(scratch.data()),
        matmul_(std::move(matmul)) {}

  absl::Status status() const override { return status_; }

  void Matmul(const MatmulArrays& arrays) override {
    if (!status_.ok()) return;
    const CudaCurrent current(device_.ordinal());
    if (current.result() == cudaSuccess) {
      status_ = matmul_->Run(stream_, arrays);
    } else {
      Fail(current.result(), "a matrix product");
    }
  }
  void AddBias(const AddBiasArrays& arrays) override {
    Enqueue("a bias", [&] { return cuda::LaunchAddBias(stream_, compute_, arrays); });
  }
  void ColumnSums(const void* matrix, int64_t rows, int64_t columns, const Target& sums) override {
    Enqueue("sums of columns", [&] {
      return cuda::LaunchColumnSums(stream_, compute_, matrix, rows, columns,
                                    reinterpret_cast<float*>(scratch_), sums);
    });
  }
  void Norm(const NormArrays& arrays) override {
    Enqueue("a layer norm", [&] { return cuda::LaunchNorm(stream_, compute_, arrays); });
  }
  void NormBackward(const NormBackwardArrays& arrays) override {
    Enqueue("a layer norm's backward", [&] {
      return cuda::LaunchNormBackward(stream_, compute_, arrays,
                                      reinterpret_cast<float*>(scratch_));
    });
  }
  void Attention(const AttentionArrays& arrays) override {
    Enqueue("attention", [&] { return cuda::LaunchAttention(stream_, compute_, arrays); });
  }
  void AttentionBackward(const AttentionBackwardArrays& arrays) override {
    Enqueue("attention's backward",
            [&] { return cuda::LaunchAttentionBackward(stream_, compute_, arrays, scratch_); });
  }
  void LogitTerms(const CrossEntropyArrays& arrays) override {
    Enqueue("terms of logits", [&] { return cuda::LaunchLogitTerms(stream_, compute_, arrays); });
  }
  void LogitSums(const CrossEntropyArrays& arrays) override {
    Enqueue("sums of logits", [&] { return cuda::LaunchLogitSums(stream_, arrays); });
  }
  void CrossEntropy(const CrossEntropyArrays& arrays) override {
    Enqueue("cross-entropy", [&] { return cuda::LaunchCrossEntropy(stream_, compute_, arrays); });
  }
  void Mean(const float* numbers, int64_t count, float* mean) override {
    Enqueue("a mean", [&] { return cuda::LaunchMean(stream_, numbers, count, mean); });
  }
  void Embed(const EmbedArrays& arrays) override {
    Enqueue("an embedding", [&] { return cuda::LaunchEmbed(stream_, compute_, arrays); });
  }
  void EmbedBackward(const EmbedBackwardArrays& arrays) override {
    Enqueue("an embedding's backward", [&] {
      return cuda::LaunchEmbedBackward(stream_, compute_, arrays,
                                       reinterpret_cast<int32_t*>(scratch_));
    });
  }

  void Replay(std::span<const uint64_t> key, absl::FunctionRef<void()> calls) override {
    if (!status_.ok()) return;
    if (!graphs_) return calls();
    const CudaCurrent current(device_.ordinal());
    if (current.result() != cudaSuccess) return Fail(current.result(), "a CUDA graph");
    status_ = graphs_->Run(key, [&] {
      calls();
      return std::exchange(status_, absl::OkStatus());
    });
  }
  void KeepGraphs(int64_t most) override {
    graphs_.reset();
    if (most > 0) graphs_.emplace(device_, stream_, most);
  }
  GraphUse graphs() const override { return graphs_ ? graphs_->use() : GraphUse(); }
  void ChooseProducts(const ProductChoice& choice) override { matmul_->Choose(choice); }
  std::string product_letters() const override { return matmul_->letters(); }

 private:
  template <class Launch>
  void Enqueue(const char* what, const Launch& launch) {
    if (!status_.ok()) return;
    const CudaCurrent current(device_.ordinal());
    Fail(current.result() == cudaSuccess ? launch() : current.result(), what);
  }
  // Does nothing for cudaSuccess.
  void Fail(cudaError_t result, const char* what) {
    if (result == cudaSuccess) return;
    status_ = CudaStatus(result, absl::StrCat("launching ", what, " on ", device_.description()));
  }

  const Device device_;
  const cudaStream_t stream_;
  const DType compute_;
  std::byte* const scratch_;
  const std::unique_ptr<cuda::Matmul> matmul_;
  std::optional<CallGraphs> graphs_;
  absl::Status status_;
};

cudaError_t LoadKernels(DType compute) {
  for (const auto load :
       {&cuda::LoadElementWiseKernels, &cuda::LoadNormKernels, &cuda::LoadCrossEntropyKernels,
        &cuda::LoadEmbeddingKernels, &cuda::LoadAttentionKernels,
        &cuda::LoadAttentionBackwardKernels, &cuda::LoadProductKernels}) {
    if (const cudaError_t result = load(compute); result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

}  // namespace

bool CudaOpsAreBuilt() {
  return true;
}

int64_t CudaScratchBytes(DType compute, const OpsLimits& limits) {
  return ScratchOf(compute, limits).all();
}

absl::StatusOr<std::unique_ptr<Ops>> NewCudaOps(const Device& device, DType compute,
                                                const OpsLimits& limits,
                                                std::span<std::byte> scratch) {
  GPT_RETURN_IF_ERROR(device.status());
  const ScratchOf sizes(compute, limits);
  if (static_cast<int64_t>(scratch.size()) < sizes.all()) {
    return absl::InvalidArgumentError(absl::StrCat("the ops were given ", scratch.size(),
                                                   " bytes of scratch and need ", sizes.all()));
  }
  const CudaCurrent current(device.ordinal());
  const DriverMemory::Measured measured(device);
  GPT_RETURN_IF_ERROR(CudaStatus(
      LoadKernels(compute), absl::StrCat("loading gpt's kernels onto ", device.description())));
  GPT_ASSIGN_OR_RETURN(
      std::unique_ptr<cuda::Matmul> matmul,
      cuda::Matmul::Create(compute, scratch.first(static_cast<size_t>(sizes.matmul))));
  return std::make_unique<CudaOps>(device, compute, scratch, std::move(matmul));
}

}  // namespace ebb::gpt
