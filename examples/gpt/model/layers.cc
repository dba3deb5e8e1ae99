#include "model/layers.h"

#include <array>

#include "model/space.h"
#include "status_macros.h"

namespace ebb::gpt {
// All that a pass depends on. Parameters and gradients are looked up here, once each, because a
// second request would give a gradient another beta.
class Layers::BlockPass {
 public:
  BlockPass(const BlockIds& block, const Batch& batch, const void* input, int64_t slot) {
    for (size_t i = 0; const WeightAndBias& both : {block.norm1, block.qkv, block.projection,
                                                    block.norm2, block.up, block.down})
      ids_[i++] = both.weight, ids_[i++] = both.bias;
    Add(batch.sequences);
    Add(batch.length);
    Add(slot);
    Add(input);
  }

  void Add(int64_t number) { key_[words_++] = static_cast<uint64_t>(number); }
  void Add(const void* address) { key_[words_++] = reinterpret_cast<uintptr_t>(address); }
  void LookUp(Parameters parameters) {
    for (size_t i = 0; i < kCount; ++i) Add(parameters_[i] = parameters(ids_[i]));
  }
  void LookUp(Gradients gradients) {
    for (size_t i = 0; i < kCount; ++i) {
      const Target& target = gradients_[i] = gradients(ids_[i]);
      Add(target.data);
      Add(int64_t{static_cast<int>(target.dtype)} * 2 + (target.beta != 0));
    }
  }

  const void* parameter(ParameterId id) const { return parameters_[IndexOf(id)]; }
  Target gradient(ParameterId id) const { return gradients_[IndexOf(id)]; }
  std::span<const uint64_t> key() const { return std::span(key_).first(words_); }

 private:
  static constexpr size_t kCount = 12;

  size_t IndexOf(ParameterId id) const {
    size_t i = 0;
    while (ids_[i] != id) ++i;  // a pass asks only for parameters of its block
    return i;
  }

  std::array<ParameterId, kCount> ids_ = {};
  std::array<const void*, kCount> parameters_ = {};
  std::array<Target, kCount> gradients_ = {};
  std::array<uint64_t, 6 + 3 * kCount> key_ = {};
  size_t words_ = 0;
};

int64_t Layers::WorkspaceBytes(const Processor& processor, const GptShape& shape,
                               const Options& options) {
  return Space(processor, shape, options, nullptr).bytes;
}

Layers::Layers(const Device& device, const Gpt& gpt, const Options& options, TensorAxis tensor)
    : device_(device),
      gpt_(gpt),
      options_(options),
      tensor_(tensor),
      share_(ShareOf(gpt.shape, tensor.rank(), options.tensor.ranks)) {}

absl::StatusOr<std::unique_ptr<Layers>> Layers::Create(const Device& device, const Gpt& gpt,
                                                       const Options& options,
                                                       std::span<std::byte> workspace,
                                                       TensorAxis tensor) {
  std::unique_ptr<Layers> layers(new Layers(device, gpt, options, tensor));
  layers->space_ = std::make_unique<Space>(device, gpt.shape, options, workspace.data());
  const Space& space = *layers->space_;
  GPT_ASSIGN_OR_RETURN(layers->own_ops_,
                       NewOps(device, options.compute, Space::Limits(gpt.shape, options),
                              {space.ops_scratch, static_cast<size_t>(space.ops_scratch_bytes)}));
  layers->ops_ = layers->own_ops_.get();
  GPT_ASSIGN_OR_RETURN(
      layers->host_logits_,
      device.AllocateShared(options.tensor.ranks *
                                ShareOf(gpt.shape, 0, options.tensor.ranks).vocabulary *
                                int64_t{sizeof(float)},
                            "logits to sample from"));
  return layers;
}

Layers::~Layers() = default;

absl::Status Layers::Prepare(DType gradient) {
  void* const any = space_->hidden;  // not read or written
  const Batch batch = {.sequences = options_.sequences, .length = gpt_.shape.context};
  const auto parameter = [&](ParameterId) -> const void* { return any; };
  alone_ = true;
  absl::Status prepared = own_ops_->Prepare([&](Ops& preparing) {
    ops_ = &preparing;
    BlockForward(parameter, 0, batch, any, /*slot=*/0, any);
    for (const float beta : {0.0f, 1.0f}) {
      const auto target = [&](ParameterId) { return Target{any, gradient, beta}; };
      HeadBackward(parameter, target, batch, any, nullptr, any);
      BlockBackward(parameter, target, 0, batch, any, /*slot=*/0, any, any);
    }
    ops_ = own_ops_.get();
  });
  alone_ = false;
  return prepared;
}

const void* Layers::Gathered(const void* own, int64_t own_rows, void* whole) {
  if (!options_.tensor.divides_rows) return own;
  const int64_t width = gpt_.shape.width, shape[] = {own_rows, width},
                all[] = {own_rows * options_.tensor.ranks, width};
  if (!alone_) {
    tensor_.AllGather({.data = own, .dtype = options_.compute, .shape = shape},
                      {.data = whole, .dtype = options_.compute, .shape = all});
  }
  return whole;
}

void* Layers::SumTerms(void* terms, int64_t own_rows, void* own) {
  const TensorSplit& tensor = options_.tensor;
  if (!tensor.cuts()) return terms;
  const int64_t width = gpt_.shape.width, shape[] = {own_rows, width},
                all[] = {own_rows * tensor.row_parts(), width};
  const MutableTensorView whole = {.data = terms, .dtype = options_.compute, .shape = all};
  if (!tensor.divides_rows) {
    if (!alone_) tensor_.AllReduce(whole);
    return terms;
  }
  if (!alone_) {
    tensor_.ReduceScatter(whole, {.data = own, .dtype = options_.compute, .shape = shape});
  }
  return own;
}

void Layers::ReduceNumbers(float* numbers, int64_t count, ReduceOp op) {
  const int64_t shape[] = {count};
  if (!alone_) tensor_.AllReduce({.data = numbers, .shape = shape}, op);
}

void Layers::SumProducts(Parameters parameters, const WeightAndBias& ids, const void* input,
                         int64_t inputs, const Batch& batch, const void* residual, void* output) {
  void* const terms = space_->row_scratch;
  MatmulArrays product =
      Linear(parameters, ids, input, batch.rows(), inputs, gpt_.shape.width, terms);
  product.bias = nullptr;
  ops_->Matmul(product);
  ops_->AddBias({.input = SumTerms(terms, OwnRows(batch), space_->own_rows),
                 .bias = parameters(ids.bias),
                 .residual = residual,
                 .output = output,
                 .rows = OwnRows(batch),
                 .width = gpt_.shape.width});
}

void Layers::SummedWeightGradient(Gradients gradients, const WeightAndBias& ids, const void* input,
                                  int64_t inputs, const Batch& batch, const void* whole_gradient,
                                  const void* own_gradient) {
  const int64_t width = gpt_.shape.width;
  const Target weight = gradients(ids.weight), bias = gradients(ids.bias);
  const bool apart = options_.tensor.cuts();
  WeightGradient(whole_gradient, input, batch.rows(), inputs, width, weight,
                 apart ? Target() : bias);
  if (apart) ops_->ColumnSums(own_gradient, OwnRows(batch), width, bias);
}

NormArrays Layers::Norm(Parameters parameters, const WeightAndBias& ids, const void* input,
                        const Statistics& kept, void* output, int64_t rows) const {
  return {.input = input,
          .weight = parameters(ids.weight),
          .bias = parameters(ids.bias),
          .output = output,
          .mean = kept.mean,
          .reciprocal_deviation = kept.deviation,
          .rows = rows,
          .width = gpt_.shape.width};
}

void Layers::NormBackward(const NormArrays& norm, const void* output_gradient,
                          const void* residual_gradient, void* input_gradient, const Target& weight,
                          const Target& bias) {
  ops_->NormBackward({.input = norm.input,
                      .weight = norm.weight,
                      .mean = norm.mean,
                      .reciprocal_deviation = norm.reciprocal_deviation,
                      .output_gradient = output_gradient,
                      .residual_gradient = residual_gradient,
                      .input_gradient = input_gradient,
                      .weight_gradient = weight,
                      .bias_gradient = bias,
                      .rows = norm.rows,
                      .width = norm.width});
}

MatmulArrays Layers::Linear(Parameters parameters, const WeightAndBias& ids, const void* input,
                            int64_t rows, int64_t inputs, int64_t outputs, void* output) const {
  return {.a = input,
          .b = parameters(ids.weight),
          .b_transposed = true,
          .bias = parameters(ids.bias),
          .c = {output, options_.compute, 0},
          .m = rows,
          .n = outputs,
          .k = inputs};
}

MatmulArrays Layers::InputGradient(const void* output_gradient, const void* weight, int64_t rows,
                                   int64_t inputs, int64_t outputs, void* gradient) const {
  return {.a = output_gradient,
          .b = weight,
          .c = {gradient, options_.compute, 0},
          .m = rows,
          .n = inputs,
          .k = outputs};
}

void Layers::WeightGradient(const void* output_gradient, const void* input, int64_t rows,
                            int64_t inputs, int64_t outputs, const Target& weight,
                            const Target& bias) {
  ops_->Matmul({.a = output_gradient,
                .a_transposed = true,
                .b = input,
                .c = weight,
                .a_sums = bias,
                .m = outputs,
                .n = inputs,
                .k = rows});
}

// A row comes from the rank that has its token. The others give 0, so the sum is exact.
void Layers::Embed(Parameters parameters, const Batch& batch, void* output) {
  const bool divides = options_.tensor.divides_rows;
  void* const rows = divides ? space_->row_scratch : output;
  ops_->Embed({.token_table = parameters(gpt_.tokens),
               .position_table = parameters(gpt_.positions),
               .ids = batch.tokens,
               .output = rows,
               .sequences = batch.sequences,
               .tokens = batch.length,
               .width = gpt_.shape.width,
               .first_token = share_.first_token,
               .end_token = share_.first_token + share_.vocabulary});
  SumTerms(rows, OwnRows(batch), output);
}

void Layers::EmbedBackward(Gradients gradients, const Batch& batch, const void* output_gradient) {
  ops_->EmbedBackward(
      {.output_gradient = Gathered(output_gradient, OwnRows(batch), space_->row_scratch),
       .ids = batch.tokens,
       .token_gradient = gradients(gpt_.tokens),
       .position_gradient = gradients(gpt_.positions),
       .sequences = batch.sequences,
       .tokens = batch.length,
       .width = gpt_.shape.width,
       .vocabulary = share_.vocabulary,
       .context = gpt_.shape.context,
       .first_token = share_.first_token});
}

void Layers::EnqueueForward(Parameters parameters, int64_t block, const Batch& batch,
                            const void* input, int64_t slot, void* output) {
  const BlockIds& ids = gpt_.blocks[block];
  const Slot& kept = space_->slots[slot];
  const int64_t rows = batch.rows(), own = OwnRows(batch), width = gpt_.shape.width;
  const bool cuts = options_.tensor.cuts(), divides = options_.tensor.divides_rows;
  void* const normal = divides ? space_->own_rows : space_->row_scratch;
  ops_->Norm(Norm(parameters, ids.norm1, input, kept.norm1, normal, own));
  ops_->Matmul(Linear(parameters, ids.qkv, Gathered(normal, own, space_->row_scratch), rows, width,
                      3 * share_.width, kept.qkv));
  ops_->Attention({.qkv = kept.qkv,
                   .output = kept.attention,
                   .log_sum_exp = kept.log_sum_exp,
                   .sequences = batch.sequences,
                   .tokens = batch.length,
                   .heads = share_.heads,
                   .width = share_.width});
  void* const normal2 = divides ? space_->own_rows : space_->row_scratch_gradient;
  if (cuts) {
    SumProducts(parameters, ids.projection, kept.attention, share_.width, batch, input,
                kept.middle);
    ops_->Norm(Norm(parameters, ids.norm2, kept.middle, kept.norm2, normal2, own));
  } else {
    void* const projected = space_->row_scratch;
    ops_->Matmul(Linear(parameters, ids.projection, kept.attention, rows, width, width, projected));
    NormArrays norm2 = Norm(parameters, ids.norm2, input, kept.norm2, normal2, rows);
    norm2.residual = projected;
    norm2.sum = kept.middle;
    ops_->Norm(norm2);
  }
  // Computes the GELU even if only its input is wanted again, because a product that ends otherwise
  // may have other bits.
  MatmulArrays up = Linear(parameters, ids.up, Gathered(normal2, own, space_->row_scratch_gradient),
                           rows, width, share_.hidden, space_->hidden);
  up.before_gelu = kept.up;
  ops_->Matmul(up);
  if (output == nullptr) return;
  if (cuts) {
    SumProducts(parameters, ids.down, space_->hidden, share_.hidden, batch, kept.middle, output);
    return;
  }
  MatmulArrays down = Linear(parameters, ids.down, space_->hidden, rows, 4 * width, width, output);
  down.added = kept.middle;
  ops_->Matmul(down);
}

void Layers::EnqueueBackward(Parameters parameters, Gradients gradients, int64_t block,
                             const Batch& batch, const void* input, int64_t slot,
                             const void* output_gradient, void* input_gradient) {
  const BlockIds& ids = gpt_.blocks[block];
  const Slot& kept = space_->slots[slot];
  const int64_t rows = batch.rows(), own = OwnRows(batch), width = gpt_.shape.width;
  void* const normal = options_.tensor.divides_rows ? space_->own_rows : space_->row_scratch;
  void *const whole = space_->row_scratch, *const gradient = space_->row_scratch_gradient;
  // Gradients of the weight and bias of a layer that is cut by its outputs, and this rank's term of
  // its input's: in `gradient`.
  const auto cut_by_outputs = [&](const WeightAndBias& layer, const void* from, int64_t outputs,
                                  const void* to_gradient) {
    WeightGradient(to_gradient, from, rows, width, outputs, gradients(layer.weight),
                   gradients(layer.bias));
    ops_->Matmul(
        InputGradient(to_gradient, parameters(layer.weight), rows, width, outputs, gradient));
  };

  // The feed-forward half. The weight's gradient needs GELU's output; GELU's gradient comes only
  // after the product with the weight.
  const void* const to_down = Gathered(output_gradient, own, whole);
  MatmulArrays down = InputGradient(to_down, parameters(ids.down.weight), rows, share_.hidden,
                                    width, space_->hidden_gradient);
  down.gelu_input = kept.up;
  down.gelu_output = space_->hidden;
  ops_->Matmul(down);
  SummedWeightGradient(gradients, ids.down, space_->hidden, share_.hidden, batch, to_down,
                       output_gradient);
  const NormArrays norm2 = Norm(parameters, ids.norm2, kept.middle, kept.norm2, normal, own);
  ops_->Norm(norm2);
  cut_by_outputs(ids.up, Gathered(normal, own, whole), share_.hidden, space_->hidden_gradient);
  // Until the end, `input_gradient` is the gradient of `middle`.
  NormBackward(norm2, SumTerms(gradient, own, space_->own_rows), output_gradient, input_gradient,
               gradients(ids.norm2.weight), gradients(ids.norm2.bias));

  // The attention half.
  const void* const to_projection = Gathered(input_gradient, own, whole);
  SummedWeightGradient(gradients, ids.projection, kept.attention, share_.width, batch,
                       to_projection, input_gradient);
  ops_->Matmul(InputGradient(to_projection, parameters(ids.projection.weight), rows, share_.width,
                             width, gradient));
  void* const qkv_gradient = space_->hidden;
  ops_->AttentionBackward({.qkv = kept.qkv,
                           .output = kept.attention,
                           .output_gradient = gradient,
                           .log_sum_exp = kept.log_sum_exp,
                           .qkv_gradient = qkv_gradient,
                           .sequences = batch.sequences,
                           .tokens = batch.length,
                           .heads = share_.heads,
                           .width = share_.width});
  const NormArrays norm1 = Norm(parameters, ids.norm1, input, kept.norm1, normal, own);
  ops_->Norm(norm1);
  cut_by_outputs(ids.qkv, Gathered(normal, own, whole), 3 * share_.width, qkv_gradient);
  NormBackward(norm1, SumTerms(gradient, own, space_->own_rows), input_gradient, input_gradient,
               gradients(ids.norm1.weight), gradients(ids.norm1.bias));
}

void Layers::BlockForward(Parameters parameters, int64_t block, const Batch& batch,
                          const void* input, int64_t slot, void* output) {
  if (!Replays(batch)) return EnqueueForward(parameters, block, batch, input, slot, output);
  BlockPass pass(gpt_.blocks[block], batch, input, slot);
  pass.Add(output);
  pass.LookUp(parameters);
  const auto parameter = [&](ParameterId id) { return pass.parameter(id); };
  ops_->Replay(pass.key(), [&] { EnqueueForward(parameter, block, batch, input, slot, output); });
}

void Layers::BlockBackward(Parameters parameters, Gradients gradients, int64_t block,
                           const Batch& batch, const void* input, int64_t slot,
                           const void* output_gradient, void* input_gradient) {
  if (!Replays(batch)) {
    return EnqueueBackward(parameters, gradients, block, batch, input, slot, output_gradient,
                           input_gradient);
  }
  BlockPass pass(gpt_.blocks[block], batch, input, slot);
  pass.Add(output_gradient);
  pass.Add(input_gradient);
  pass.LookUp(parameters);
  pass.LookUp(gradients);
  const auto parameter = [&](ParameterId id) { return pass.parameter(id); };
  const auto gradient = [&](ParameterId id) { return pass.gradient(id); };
  ops_->Replay(pass.key(), [&] {
    EnqueueBackward(parameter, gradient, block, batch, input, slot, output_gradient,
                    input_gradient);
  });
}

}  // namespace ebb::gpt
