// The trainer that the engine is measured against: the same GPT kernels, optimizer, casts and norm,
// on one contiguous buffer per class, in one process, without an engine. At world 1 its masters
// equal the engine's, bit for bit, on the CPU and on a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "data/batches.h"
#include "data/text.h"
#include "ebb/ebb.h"
#include "ebb/optim/kernels.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/report/machine_costs.h"
#include "model/layers.h"

namespace ebb::bench {

class BareTrainer {
 public:
  struct Options {
    gpt::GptShape shape;
    DType compute = DType::kFloat32;
    int64_t sequences = 1;
    uint64_t seed = 1;
    OptimizerConfig optimizer;
    double gradient_clipping = 1;
  };
  static absl::StatusOr<std::unique_ptr<BareTrainer>> Create(const Device& device,
                                                             const Options& options,
                                                             const gpt::Text& text);

  // Returns when the device has finished the step.
  absl::Status Step(int64_t step);
  // Only a step's forward and backward. Adds the seconds of each visit to `seconds`, unless it is
  // empty. Seconds are right only on the CPU, because a call returns there when it has computed.
  absl::Status Pass(int64_t step, std::span<sharding::KernelWork> seconds = {});
  // A part of a parameter's elements, at most kPieceMax of them, on the host; valid until the next
  // call.
  static constexpr int64_t kPieceMax = int64_t{1} << 24;
  absl::StatusOr<std::span<const float>> Masters(const Slice& slice);
  // The elements of all parameters, without the gaps between them.
  int64_t elements() const;

 private:
  // The data that host and device exchange, in memory that both reach.
  struct Shared {
    std::span<double> squares;  // of each unit's gradient
    optim::UpdateConstants* constants = nullptr;
    float* loss_scale = nullptr;
    float* staging = nullptr;  // a piece of the masters, between the device and the host
  };

  BareTrainer(const Device& device, const Options& options, const gpt::Text& text);
  absl::Status MakeArrays();
  absl::Status MakeMasters();
  absl::Status FillMasters(ParameterId p);
  absl::Status LoadBatch(int64_t step);
  int64_t OffsetOf(ParameterId p) const;
  const void* Parameter(ParameterId p) const;
  gpt::Target Gradient(ParameterId p, bool head);
  void SumSquares();
  void Update();

  const Options options_;
  const gpt::Text& text_;
  Device device_;
  Stream stream_;
  ModelSpec model_;
  gpt::Gpt gpt_;
  sharding::ModelLayout layout_;
  std::vector<int64_t> unit_offsets_;
  int64_t elements_ = 0;  // of all units; the tied unit's second gradient comes after them
  int64_t boundary_bytes_ = 0;
  std::unique_ptr<optim::Kernels> kernels_;
  Buffer parameters_, masters_, gradients_, summed_, momentum_, variance_;
  Buffer workspace_, boundaries_, boundary_gradients_, norm_blocks_, shared_memory_;
  Buffer constants_;  // of updates, as kernels read them
  Shared shared_;
  std::unique_ptr<gpt::Layers> layers_;
  std::optional<gpt::Batches> batches_;
  std::vector<bool>
      written_;  // gradients of parameters (and, after them, of the head visit) written this step
  int64_t updates_ = 0;
};

}  // namespace ebb::bench
