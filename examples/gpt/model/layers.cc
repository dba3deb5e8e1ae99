#include "model/layers.h"

#include "model/layers_space.h"
#include "status_macros.h"

namespace ebb::gpt {

int64_t Layers::WorkspaceBytes(const Processor& processor, const GptShape& shape,
                               const Options& options) {
  return Space(processor, shape, options, nullptr).bytes;
}

Layers::Layers(const Device& device, const Gpt& gpt, const Options& options)
    : device_(device), gpt_(gpt), options_(options) {}

absl::StatusOr<std::unique_ptr<Layers>> Layers::Create(const Device& device, const Gpt& gpt,
                                                       const Options& options,
                                                       std::span<std::byte> workspace) {
  std::unique_ptr<Layers> layers(new Layers(device, gpt, options));
  layers->space_ = std::make_unique<Space>(device, gpt.shape, options, workspace.data());
  const Space& space = *layers->space_;
  GPT_ASSIGN_OR_RETURN(layers->own_ops_,
                       NewOps(device, options.compute, Space::Limits(gpt.shape, options),
                              {space.ops_scratch, static_cast<size_t>(space.ops_scratch_bytes)}));
  layers->ops_ = layers->own_ops_.get();
  GPT_ASSIGN_OR_RETURN(layers->host_logits_,
                       device.AllocateShared(gpt.shape.vocabulary * int64_t{sizeof(float)},
                                             "logits to sample from"));
  return layers;
}

Layers::~Layers() = default;

absl::Status Layers::Prepare(DType gradient) {
  void* const any = space_->hidden;  // not read or written
  const Batch batch = {.sequences = options_.sequences, .length = gpt_.shape.context};
  const auto parameter = [&](ParameterId) -> const void* { return any; };
  return own_ops_->Prepare([&](Ops& preparing) {
    ops_ = &preparing;
    BlockForward(parameter, 0, batch, any, /*slot=*/0, any);
    for (const float beta : {0.0f, 1.0f}) {
      const auto target = [&](ParameterId) { return Target{any, gradient, beta}; };
      HeadBackward(parameter, target, batch, any, nullptr, any);
      BlockBackward(parameter, target, 0, batch, any, /*slot=*/0, any, any);
    }
    ops_ = own_ops_.get();
  });
}

void Layers::Linear(Parameters parameters, const void* input, ParameterId weight, ParameterId bias,
                    int64_t rows, int64_t inputs, int64_t outputs, void* output) {
  ops_->Matmul({.a = input,
                .b = parameters(weight),
                .b_transposed = true,
                .bias = parameters(bias),
                .c = {output, options_.compute, 0},
                .m = rows,
                .n = outputs,
                .k = inputs});
}

void Layers::LinearBackward(Parameters parameters, Gradients gradients, const void* input,
                            ParameterId weight, ParameterId bias, int64_t rows, int64_t inputs,
                            int64_t outputs, const void* output_gradient, void* input_gradient) {
  ops_->Matmul({.a = output_gradient,
                .a_transposed = true,
                .b = input,
                .c = gradients(weight),
                .a_sums = gradients(bias),
                .m = outputs,
                .n = inputs,
                .k = rows});
  if (input_gradient == nullptr) return;
  ops_->Matmul({.a = output_gradient,
                .b = parameters(weight),
                .c = {input_gradient, options_.compute, 0},
                .m = rows,
                .n = inputs,
                .k = outputs});
}

void Layers::Embed(Parameters parameters, const Batch& batch, void* output) {
  ops_->Embed({.token_table = parameters(gpt_.tokens),
               .position_table = parameters(gpt_.positions),
               .ids = batch.tokens,
               .output = output,
               .sequences = batch.sequences,
               .tokens = batch.length,
               .width = gpt_.shape.width});
}

void Layers::EmbedBackward(Gradients gradients, const Batch& batch, const void* output_gradient) {
  ops_->EmbedBackward({.output_gradient = output_gradient,
                       .ids = batch.tokens,
                       .token_gradient = gradients(gpt_.tokens),
                       .position_gradient = gradients(gpt_.positions),
                       .sequences = batch.sequences,
                       .tokens = batch.length,
                       .width = gpt_.shape.width,
                       .vocabulary = gpt_.shape.vocabulary,
                       .context = gpt_.shape.context});
}

void Layers::EnqueueForward(Parameters parameters, int64_t block, const Batch& batch,
                            const void* input, int64_t slot, void* output) {
  const BlockIds& ids = gpt_.blocks[block];
  const Slot& kept = space_->slots[slot];
  const int64_t rows = batch.rows(), width = gpt_.shape.width;
  ops_->Norm({.input = input,
              .weight = parameters(ids.norm1_weight),
              .bias = parameters(ids.norm1_bias),
              .output = space_->row_scratch,
              .mean = kept.mean1,
              .reciprocal_deviation = kept.deviation1,
              .rows = rows,
              .width = width});
  Linear(parameters, space_->row_scratch, ids.qkv_weight, ids.qkv_bias, rows, width, 3 * width,
         kept.qkv);
  ops_->Attention({.qkv = kept.qkv,
                   .output = kept.attention,
                   .log_sum_exp = kept.log_sum_exp,
                   .sequences = batch.sequences,
                   .tokens = batch.length,
                   .heads = gpt_.shape.heads,
                   .width = width});
  Linear(parameters, kept.attention, ids.projection_weight, ids.projection_bias, rows, width, width,
         space_->row_scratch);
  ops_->Norm({.input = input,
              .residual = space_->row_scratch,
              .sum = kept.middle,
              .weight = parameters(ids.norm2_weight),
              .bias = parameters(ids.norm2_bias),
              .output = space_->row_scratch_gradient,
              .mean = kept.mean2,
              .reciprocal_deviation = kept.deviation2,
              .rows = rows,
              .width = width});
  // Computes the GELU even if only its input is wanted again, because a product that ends otherwise
  // may have other bits.
  ops_->Matmul({.a = space_->row_scratch_gradient,
                .b = parameters(ids.up_weight),
                .b_transposed = true,
                .bias = parameters(ids.up_bias),
                .c = {space_->hidden, options_.compute, 0},
                .before_gelu = kept.up,
                .m = rows,
                .n = 4 * width,
                .k = width});
  if (output == nullptr) return;
  ops_->Matmul({.a = space_->hidden,
                .b = parameters(ids.down_weight),
                .b_transposed = true,
                .bias = parameters(ids.down_bias),
                .c = {output, options_.compute, 0},
                .added = kept.middle,
                .m = rows,
                .n = width,
                .k = 4 * width});
}

void Layers::EnqueueBackward(Parameters parameters, Gradients gradients, int64_t block,
                             const Batch& batch, const void* input, int64_t slot,
                             const void* output_gradient, void* input_gradient) {
  const BlockIds& ids = gpt_.blocks[block];
  const Slot& kept = space_->slots[slot];
  const int64_t rows = batch.rows(), width = gpt_.shape.width;

  // The feed-forward half. The weight's gradient needs GELU's output; GELU's gradient comes only
  // after the product with the weight.
  ops_->Matmul({.a = output_gradient,
                .b = parameters(ids.down_weight),
                .c = {space_->hidden_gradient, options_.compute, 0},
                .gelu_input = kept.up,
                .gelu_output = space_->hidden,
                .m = rows,
                .n = 4 * width,
                .k = width});
  LinearBackward(parameters, gradients, space_->hidden, ids.down_weight, ids.down_bias, rows,
                 4 * width, width, output_gradient, nullptr);
  const NormArrays norm2 = {.input = kept.middle,
                            .weight = parameters(ids.norm2_weight),
                            .bias = parameters(ids.norm2_bias),
                            .output = space_->row_scratch,
                            .mean = kept.mean2,
                            .reciprocal_deviation = kept.deviation2,
                            .rows = rows,
                            .width = width};
  ops_->Norm(norm2);
  LinearBackward(parameters, gradients, space_->row_scratch, ids.up_weight, ids.up_bias, rows,
                 width, 4 * width, space_->hidden_gradient, space_->row_scratch_gradient);
  ops_->NormBackward({.input = kept.middle,
                      .weight = norm2.weight,
                      .mean = kept.mean2,
                      .reciprocal_deviation = kept.deviation2,
                      .output_gradient = space_->row_scratch_gradient,
                      .residual_gradient = output_gradient,
                      .input_gradient = input_gradient,  // until the end, the gradient of `middle`
                      .weight_gradient = gradients(ids.norm2_weight),
                      .bias_gradient = gradients(ids.norm2_bias),
                      .rows = rows,
                      .width = width});

  // The attention half.
  LinearBackward(parameters, gradients, kept.attention, ids.projection_weight, ids.projection_bias,
                 rows, width, width, input_gradient, space_->row_scratch_gradient);
  void* qkv_gradient = space_->hidden;
  ops_->AttentionBackward({.qkv = kept.qkv,
                           .output = kept.attention,
                           .output_gradient = space_->row_scratch_gradient,
                           .log_sum_exp = kept.log_sum_exp,
                           .qkv_gradient = qkv_gradient,
                           .sequences = batch.sequences,
                           .tokens = batch.length,
                           .heads = gpt_.shape.heads,
                           .width = width});
  const NormArrays norm1 = {.input = input,
                            .weight = parameters(ids.norm1_weight),
                            .bias = parameters(ids.norm1_bias),
                            .output = space_->row_scratch,
                            .mean = kept.mean1,
                            .reciprocal_deviation = kept.deviation1,
                            .rows = rows,
                            .width = width};
  ops_->Norm(norm1);
  LinearBackward(parameters, gradients, space_->row_scratch, ids.qkv_weight, ids.qkv_bias, rows,
                 width, 3 * width, qkv_gradient, space_->row_scratch_gradient);
  ops_->NormBackward({.input = input,
                      .weight = norm1.weight,
                      .mean = kept.mean1,
                      .reciprocal_deviation = kept.deviation1,
                      .output_gradient = space_->row_scratch_gradient,
                      .residual_gradient = input_gradient,
                      .input_gradient = input_gradient,
                      .weight_gradient = gradients(ids.norm1_weight),
                      .bias_gradient = gradients(ids.norm1_bias),
                      .rows = rows,
                      .width = width});
}

}  // namespace ebb::gpt
