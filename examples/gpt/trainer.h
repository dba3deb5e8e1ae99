// One rank's training: the model in an engine, and the steps, evaluations and samples that walk
// through it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "command_line/options.h"
#include "data/batches.h"
#include "data/text.h"
#include "ebb/ebb.h"
#include "model/layers.h"
#include "model/workload.h"
#include "stop.h"

namespace ebb::gpt {

// The addresses of an open scope: where each parameter is, and where its gradient goes.
struct ScopeParameters {
  const Scope& scope;
  const void* operator()(ParameterId id) const { return scope.parameter(id).data; }
};

struct ScopeGradients {
  BackwardScope& scope;
  Target operator()(ParameterId id) const {
    const BackwardScope::Fused fused = scope.fused_gradient(id);
    return {fused.tensor.data, fused.tensor.dtype, fused.beta};
  }
};

inline TensorView Scalar(const float* value) {
  return {.data = value, .dtype = DType::kFloat32, .shape = {}};
}

class Trainer {
 public:
  // Collective. `text` outlives the trainer.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(World world, Device device,
                                                         const Options& options,
                                                         const Config& config, const Text& text);

  // How products are computed, in words; empty on the CPU. On a GPU Create decides it, in a
  // separate pass over the layers (trial_passes.h): rank 0 chooses as the options say, and all ranks
  // follow.
  const std::string& products() const { return products_; }
  // The choice of products() as letters of --products; empty: the default.
  const std::string& product_letters() const { return product_letters_; }

  // Decides, as the options say, whether blocks run as CUDA graphs from now on. Returns the
  // decision and its reason in words; empty on the CPU, which has no graphs. Call it once, before
  // the first step; it waits for the device. Each rank decides for itself, because graphs change no
  // bits.
  absl::StatusOr<std::string> ChooseCudaGraphs();

  // Step number `step`, from 0: forward, backward and update. Every step's report comes once, in
  // order. The report of the step before comes when this step's work is in the queues, so that
  // waiting for it costs nothing.
  using Reported = absl::FunctionRef<void(const StepReport&)>;
  absl::Status Step(int64_t step, Reported reported);
  // Whether the report of the last step has not come yet; and that report, which waits for the
  // step's verdict.
  bool owes_report() const { return owes_report_; }
  absl::Status AwaitReport(Reported reported);
  // The mean loss over held-out text; nothing if `vote` stopped it. Collective.
  absl::StatusOr<std::optional<double>> Evaluate(StopVote& vote);
  // `prompt` continued by `bytes` bytes, or until `vote` stops it. Collective, with the same result
  // on every rank.
  absl::StatusOr<std::string> Sample(const std::string& prompt, int64_t bytes, StopVote& vote);

  int64_t tokens_per_step() const;  // of all ranks
  const ModelSpec& model() const { return work_.spec; }
  const World& world() const { return world_; }
  const Device& device() const { return device_; }
  GraphUse graphs() const { return layers_->graphs(); }
  Engine& engine() { return *engine_; }

 private:
  Trainer(World world, Device device, const Options& options, const Text& text)
      : world_(std::move(world)), device_(std::move(device)), options_(options), text_(text) {}
  absl::Status MakeEngine(const Config& config);
  absl::Status SettleProducts();
  // Errors beside the engine's.
  absl::Status status() const { return text_status_.ok() ? layers_->status() : text_status_; }

  // Fills micro-batch `micro_batch` of a step.
  const Batch& LoadBatch(int64_t step, int micro_batch);
  void RunRound(ebb::Step& step, int64_t step_number);
  int64_t SlotOf(const Scope& scope, int micro_batch, int64_t block) const;
  // A walk through the blocks that keeps nothing: the head's input, and its scope.
  ForwardScope WalkToHead(Evaluation& evaluation, const Batch& batch);

  const World world_;
  const Device device_;
  const Options& options_;
  const Text& text_;
  Workload work_;
  absl::Status text_status_;  // of reading the text
  std::optional<Engine> engine_;
  std::unique_ptr<Layers> layers_;
  std::optional<Batches> batches_;  // one for each micro-batch of a step
  std::string products_, product_letters_;
  bool owes_report_ = false;
};

}  // namespace ebb::gpt
