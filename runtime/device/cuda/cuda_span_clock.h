// A SpanClock of CUDA events.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/span_clock.h"

namespace ebb {

class CudaSpanClock : public SpanClock {
 public:
  static absl::StatusOr<std::unique_ptr<CudaSpanClock>> Create(
      std::shared_ptr<CudaContext> context);
  ~CudaSpanClock() override;

  absl::Status Reserve(int pairs) override;
  int Begin(Stream& stream) override;
  void End(int pair, Stream& stream) override;
  State Take(int pair, Span& span) override;

 private:
  // An event that the device has passed at a known time of the steady clock.
  struct Tie {
    Tie() = default;
    Tie(const Tie&) = delete;
    Tie& operator=(const Tie&) = delete;
    ~Tie();
    cudaEvent_t event = nullptr;
    int64_t ns = 0;
  };
  struct Pair {
    cudaEvent_t begin = nullptr, end = nullptr;
    std::shared_ptr<const Tie> tie = nullptr;  // its times count from here
  };

  explicit CudaSpanClock(std::shared_ptr<CudaContext> context) : context_(std::move(context)) {}
  absl::Status MakeEvent(cudaEvent_t& event) const;
  absl::Status TieToHost();
  void Record(cudaEvent_t event, Stream& stream);

  const std::shared_ptr<CudaContext> context_;
  std::vector<Pair> pairs_;
  std::vector<int> unused_;  // indices into pairs_
  std::shared_ptr<const Tie> tie_;
};

}  // namespace ebb
