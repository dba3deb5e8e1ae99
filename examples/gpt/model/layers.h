// Forward and backward of the GPT's layers for one micro-batch, on views. The layers ask for
// parameters by id, so they run both inside the engine's scopes and on plain buffers.
//
// A block's forward keeps activations for its backward in a slot of the workspace. If every block
// and waiting micro-batch has a slot of its own, nothing is computed twice. With a single slot, run
// BlockForward again before BlockBackward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/tensor_axis.h"
#include "model/model.h"
#include "ops/ops.h"

namespace ebb::gpt {

// Sequences of equal length, one after the other, in memory of the device.
struct Batch {
  const int32_t *tokens = nullptr, *targets = nullptr;
  int64_t sequences = 0, length = 0;

  int64_t rows() const { return sequences * length; }
};

using Parameters = absl::FunctionRef<const void*(ParameterId)>;
using Gradients = absl::FunctionRef<Target(ParameterId)>;

// Gives out memory piece by piece from one block. With a null block it only counts bytes, so one
// function can both measure a layout and make it.
class Arena {
 public:
  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  static constexpr int64_t kAlignment = 256;  // as cuBLASLt's workspace needs

  static int64_t Rounded(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // `bytes` at a multiple of kAlignment.
  void* Take(int64_t bytes) {
    void* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += Rounded(bytes);
    return piece;
  }
  template <class T>
  T* Take(int64_t count) {
    return static_cast<T*>(Take(count * static_cast<int64_t>(sizeof(T))));
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

class Layers {
 public:
  struct Options {
    DType compute = DType::kFloat32;
    int64_t sequences = 1;  // of a micro-batch, at most
    int64_t slots = 1;
    TensorSplit tensor = {};
  };
  // All tensor ranks take as many.
  static int64_t WorkspaceBytes(const Processor& processor, const GptShape& shape,
                                const Options& options);
  // `recompute`: a block's forward runs again before its backward.
  static ExchangedBytes Exchanged(const Processor& processor, const GptShape& shape,
                                  const Options& options, bool recompute);
  // `workspace` is device memory that outlives the layers and is theirs alone. `tensor`: the axis of
  // Options::tensor.ranks ranks.
  static absl::StatusOr<std::unique_ptr<Layers>> Create(const Device& device, const Gpt& gpt,
                                                        const Options& options,
                                                        std::span<std::byte> workspace,
                                                        TensorAxis tensor = {});
  ~Layers();

  // Whether passes leave out the collectives of tensor ranks: for those whose results are not used.
  void SetAlone(bool alone) { alone_ = alone; }

  // Prepares the passes over whole micro-batches, so that no memory is missing in a step.
  // `gradient`: the dtype of parameters' gradients.
  absl::Status Prepare(DType gradient);
  int64_t unprepared() const { return own_ops_->unprepared(); }  // of ops.h

  // The first error of a computation or of enqueuing; nothing was computed since.
  absl::Status status() const { return ops_->status(); }

  // On a GPU: launches a block's pass as a CUDA graph if it is repeated with the same addresses and
  // a whole micro-batch. At most `most` different passes become graphs; 0 (the default): none.
  // Graphs hold addresses, so call it anew after Engine::Resume. Bits do not change.
  void KeepGraphs(int64_t most) {
    ops_->KeepGraphs(most);
    keeps_graphs_ = most > 0;
  }
  GraphUse graphs() const { return ops_->graphs(); }

  // Ops' functions of these names.
  void ChooseProducts(const ProductChoice& choice) { ops_->ChooseProducts(choice); }
  std::string product_letters() const { return ops_->product_letters(); }

  void Embed(Parameters parameters, const Batch& batch, void* output);
  // Fills the slot, and `output` unless that is null.
  void BlockForward(Parameters parameters, int64_t block, const Batch& batch, const void* input,
                    int64_t slot, void* output);
  void BlockBackward(Parameters parameters, Gradients gradients, int64_t block, const Batch& batch,
                     const void* input, int64_t slot, const void* output_gradient,
                     void* input_gradient);
  // The mean loss over the batch's tokens: a number on the device, valid until the next call in
  // stream order.
  const float* HeadLoss(Parameters parameters, const Batch& batch, const void* input);
  // The loss of HeadLoss, and the gradients of loss_scale * loss; the scale is read on the device.
  // Logits are made again chunk by chunk, and never kept whole.
  const float* HeadBackward(Parameters parameters, Gradients gradients, const Batch& batch,
                            const void* input, const float* loss_scale, void* input_gradient);
  // The logits of the last position before `padding` rows, on the host; valid until the next call.
  // Waits for the device.
  std::span<const float> LastLogits(Parameters parameters, const Batch& batch, const void* input,
                                    int64_t padding = 0);
  void EmbedBackward(Gradients gradients, const Batch& batch, const void* output_gradient);

 private:
  struct Statistics;
  struct Slot;
  struct Space;
  class BlockPass;
  Layers(const Device& device, const Gpt& gpt, const Options& options, TensorAxis tensor);
  bool Replays(const Batch& batch) const {
    return keeps_graphs_ && batch.sequences == options_.sequences &&
           batch.length == gpt_.shape.context;
  }
  void EnqueueForward(Parameters parameters, int64_t block, const Batch& batch, const void* input,
                      int64_t slot, void* output);
  void EnqueueBackward(Parameters parameters, Gradients gradients, int64_t block,
                       const Batch& batch, const void* input, int64_t slot,
                       const void* output_gradient, void* input_gradient);
  // The products of normalised rows with this rank's part of the table.
  void Logits(Parameters parameters, const void* normal, int64_t rows, const Target& logits);
  // Losses of a chunk of rows, and gradients of their logits: of `own` rows from `first` on, in each
  // tensor rank's part of the batch.
  void ChunkLosses(const CrossEntropyArrays& arrays, const Batch& batch, int64_t first,
                   int64_t own);
  const float* HeadChunks(Parameters parameters, Gradients* gradients, const Batch& batch,
                          const void* input, const float* loss_scale, void* input_gradient);
  const void* Row(const void* matrix, int64_t row) const {
    return static_cast<const char*>(matrix) + row * gpt_.shape.width * SizeOf(options_.compute);
  }
  // Rows of a batch between the layers that are cut.
  int64_t OwnRows(const Batch& batch) const { return batch.rows() / options_.tensor.row_parts(); }
  // Rows of all tensor ranks, [rows, width]: the own ones, or where each rank has a part of them, all
  // in `whole`.
  const void* Gathered(const void* own, int64_t own_rows, void* whole);
  // The own rows of the sum of all ranks' `terms`, which are [rows, width]: there, or where each rank
  // has a part of the rows, in `own`.
  void* SumTerms(void* terms, int64_t own_rows, void* own);
  void ReduceNumbers(float* numbers, int64_t count, ReduceOp op);
  // The sum of the ranks' products of a layer that is cut by its inputs, with bias and residual.
  void SumProducts(Parameters parameters, const WeightAndBias& ids, const void* input,
                   int64_t inputs, const Batch& batch, const void* residual, void* output);
  // Gradients of such a layer's weight and bias. The bias is whole, so each rank sums it alike: apart
  // from the product, over its own rows.
  void SummedWeightGradient(Gradients gradients, const WeightAndBias& ids, const void* input,
                            int64_t inputs, const Batch& batch, const void* whole_gradient,
                            const void* own_gradient);
  NormArrays Norm(Parameters parameters, const WeightAndBias& ids, const void* input,
                  const Statistics& kept, void* output, int64_t rows) const;
  void NormBackward(const NormArrays& norm, const void* output_gradient,
                    const void* residual_gradient, void* input_gradient, const Target& weight,
                    const Target& bias);
  // A linear layer, the gradient of its input, and those of its weight and, unless null, its bias.
  MatmulArrays Linear(Parameters parameters, const WeightAndBias& ids, const void* input,
                      int64_t rows, int64_t inputs, int64_t outputs, void* output) const;
  MatmulArrays InputGradient(const void* output_gradient, const void* weight, int64_t rows,
                             int64_t inputs, int64_t outputs, void* gradient) const;
  void WeightGradient(const void* output_gradient, const void* input, int64_t rows, int64_t inputs,
                      int64_t outputs, const Target& weight, const Target& bias);

  const Device device_;
  const Gpt gpt_;
  const Options options_;
  const TensorAxis tensor_;
  const TensorShare share_;
  bool alone_ = false;
  std::unique_ptr<Space> space_;
  Buffer host_logits_;
  std::unique_ptr<Ops> own_ops_;
  Ops* ops_ = nullptr;  // own_ops_, except in Prepare
  bool keeps_graphs_ = false;
};

}  // namespace ebb::gpt
