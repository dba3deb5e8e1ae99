#include "model/layers.h"

#include <algorithm>
#include <array>

#include "status_macros.h"

namespace ebb::gpt {

// Kept of a norm's forward for its backward.
struct Layers::Statistics {
  float *mean = nullptr, *deviation = nullptr;
};

// Memory that one block keeps of one micro-batch's forward: 9 activations of the model's width for
// each token, and a few numbers for each row. Outputs of norms and GELU are not kept, because
// computing them again costs a pass over memory and no product.
struct Layers::Slot {
  void *qkv, *attention, *middle, *up;
  float* log_sum_exp;
  Statistics norm1, norm2;

  Slot(Arena& arena, const GptShape& shape, int64_t rows, int64_t element) {
    qkv = arena.Take(rows * 3 * shape.width * element);
    attention = arena.Take(rows * shape.width * element);
    middle = arena.Take(rows * shape.width * element);
    up = arena.Take(rows * 4 * shape.width * element);
    log_sum_exp = arena.Take<float>(rows * shape.heads);
    for (Statistics* of : {&norm1, &norm2})
      *of = {arena.Take<float>(rows), arena.Take<float>(rows)};
  }
};

struct Layers::Space {
  int64_t chunk_rows = 0;  // for the head
  std::byte* ops_scratch = nullptr;
  int64_t ops_scratch_bytes = 0;
  // Used in blocks. `hidden`: rows of 4 * width numbers; `row_scratch`: rows of `width`.
  void *hidden = nullptr, *hidden_gradient = nullptr, *row_scratch = nullptr,
       *row_scratch_gradient = nullptr;
  // Used in the head. No block's pass overlaps it, so it has the same memory.
  void *logits = nullptr, *normal = nullptr, *normal_gradient = nullptr, *logit_gradient = nullptr;
  Statistics norm;
  float* last_logits = nullptr;
  float *losses = nullptr, *loss = nullptr;  // of a micro-batch's rows, and their mean
  std::vector<Slot> slots;
  int64_t bytes = 0;

  static OpsLimits Limits(const GptShape& shape, const Options& options) {
    return {.rows = options.sequences * shape.context,
            .tokens = shape.context,
            .width = shape.width,
            .heads = shape.heads,
            .vocabulary = shape.vocabulary};
  }

  // On the CPU: about 16 MiB of logits, and at least 64 rows, because products with fewer are slow.
  static int64_t ChunkForCaches(int64_t rows, int64_t vocabulary) {
    return std::min(rows, std::max<int64_t>(64, (int64_t{4} << 20) / vocabulary));
  }
  // On a GPU: about `most` rows, so that their logits fit the memory that blocks need anyway. There
  // are as few chunks as that allows, because each adds to the table's gradient once. The chunks
  // are equal: whole tiles of a product, and no chunk has more rows.
  static int64_t ChunkForTiles(int64_t rows, int64_t most) {
    constexpr int64_t kTile = 256;
    most = std::max(most, kTile);
    const int64_t chunks = (rows + most - 1) / most, even = (rows + chunks - 1) / chunks;
    return std::min(rows, (even + kTile - 1) / kTile * kTile);
  }

  Space(const Processor& processor, const GptShape& shape, const Options& options,
        std::byte* base) {
    const int64_t rows = options.sequences * shape.context, element = SizeOf(options.compute);
    Arena arena(base);
    ops_scratch_bytes = ScratchBytes(processor, options.compute, Limits(shape, options));
    ops_scratch = arena.Take<std::byte>(ops_scratch_bytes);
    losses = arena.Take<float>(rows);
    loss = arena.Take<float>(1);
    for (int64_t i = 0; i < options.slots; ++i) slots.emplace_back(arena, shape, rows, element);

    std::byte* shared = base == nullptr ? nullptr : base + arena.used();
    Arena block(shared), head(shared);
    hidden = block.Take(rows * 4 * shape.width * element);
    hidden_gradient = block.Take(rows * 4 * shape.width * element);
    row_scratch = block.Take(rows * shape.width * element);
    row_scratch_gradient = block.Take(rows * shape.width * element);

    const DType logits_dtype = LogitsDtype(processor, options.compute);
    chunk_rows = processor.kind == DeviceKind::kCpu
                     ? ChunkForCaches(rows, shape.vocabulary)
                     : ChunkForTiles(rows, block.used() / (shape.vocabulary * element));
    logits = head.Take(chunk_rows * shape.vocabulary * SizeOf(logits_dtype));
    logit_gradient = options.compute == logits_dtype
                         ? logits
                         : head.Take(chunk_rows * shape.vocabulary * element);
    normal = head.Take(chunk_rows * shape.width * element);
    normal_gradient = head.Take(chunk_rows * shape.width * element);
    norm = {head.Take<float>(chunk_rows), head.Take<float>(chunk_rows)};
    last_logits = head.Take<float>(shape.vocabulary);
    bytes = arena.used() + std::max(block.used(), head.used());
  }
};

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
  void* const normal = space_->row_scratch;
  ops_->Norm(Norm(parameters, ids.norm1, input, kept.norm1, normal, rows));
  ops_->Matmul(Linear(parameters, ids.qkv, normal, rows, width, 3 * width, kept.qkv));
  ops_->Attention({.qkv = kept.qkv,
                   .output = kept.attention,
                   .log_sum_exp = kept.log_sum_exp,
                   .sequences = batch.sequences,
                   .tokens = batch.length,
                   .heads = gpt_.shape.heads,
                   .width = width});
  void* const projected = space_->row_scratch;
  ops_->Matmul(Linear(parameters, ids.projection, kept.attention, rows, width, width, projected));
  void* const normal2 = space_->row_scratch_gradient;
  NormArrays norm2 = Norm(parameters, ids.norm2, input, kept.norm2, normal2, rows);
  norm2.residual = projected;
  norm2.sum = kept.middle;
  ops_->Norm(norm2);
  // Computes the GELU even if only its input is wanted again, because a product that ends otherwise
  // may have other bits.
  MatmulArrays up = Linear(parameters, ids.up, normal2, rows, width, 4 * width, space_->hidden);
  up.before_gelu = kept.up;
  ops_->Matmul(up);
  if (output == nullptr) return;
  MatmulArrays down = Linear(parameters, ids.down, space_->hidden, rows, 4 * width, width, output);
  down.added = kept.middle;
  ops_->Matmul(down);
}

void Layers::EnqueueBackward(Parameters parameters, Gradients gradients, int64_t block,
                             const Batch& batch, const void* input, int64_t slot,
                             const void* output_gradient, void* input_gradient) {
  const BlockIds& ids = gpt_.blocks[block];
  const Slot& kept = space_->slots[slot];
  const int64_t rows = batch.rows(), width = gpt_.shape.width;
  void *const normal = space_->row_scratch, *const gradient = space_->row_scratch_gradient;
  // Gradients of a linear layer's weight and bias, and of its input: in `gradient`.
  const auto linear = [&](const WeightAndBias& layer, const void* from, int64_t outputs,
                          const void* to_gradient) {
    WeightGradient(to_gradient, from, rows, width, outputs, gradients(layer.weight),
                   gradients(layer.bias));
    ops_->Matmul(
        InputGradient(to_gradient, parameters(layer.weight), rows, width, outputs, gradient));
  };

  // The feed-forward half. The weight's gradient needs GELU's output; GELU's gradient comes only
  // after the product with the weight.
  MatmulArrays down = InputGradient(output_gradient, parameters(ids.down.weight), rows, 4 * width,
                                    width, space_->hidden_gradient);
  down.gelu_input = kept.up;
  down.gelu_output = space_->hidden;
  ops_->Matmul(down);
  WeightGradient(output_gradient, space_->hidden, rows, 4 * width, width,
                 gradients(ids.down.weight), gradients(ids.down.bias));
  const NormArrays norm2 = Norm(parameters, ids.norm2, kept.middle, kept.norm2, normal, rows);
  ops_->Norm(norm2);
  linear(ids.up, normal, 4 * width, space_->hidden_gradient);
  // Until the end, `input_gradient` is the gradient of `middle`.
  NormBackward(norm2, gradient, output_gradient, input_gradient, gradients(ids.norm2.weight),
               gradients(ids.norm2.bias));

  // The attention half.
  linear(ids.projection, kept.attention, width, input_gradient);
  void* const qkv_gradient = space_->hidden;
  ops_->AttentionBackward({.qkv = kept.qkv,
                           .output = kept.attention,
                           .output_gradient = gradient,
                           .log_sum_exp = kept.log_sum_exp,
                           .qkv_gradient = qkv_gradient,
                           .sequences = batch.sequences,
                           .tokens = batch.length,
                           .heads = gpt_.shape.heads,
                           .width = width});
  const NormArrays norm1 = Norm(parameters, ids.norm1, input, kept.norm1, normal, rows);
  ops_->Norm(norm1);
  linear(ids.qkv, normal, 3 * width, qkv_gradient);
  NormBackward(norm1, gradient, input_gradient, input_gradient, gradients(ids.norm1.weight),
               gradients(ids.norm1.bias));
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

void Layers::ChunkLogits(Parameters parameters, const void* input, int64_t first, int64_t rows,
                         const Target& logits) {
  const int64_t width = gpt_.shape.width;
  ops_->Norm(Norm(parameters, gpt_.norm, Row(input, first), space_->norm, space_->normal, rows));
  ops_->Matmul({.a = space_->normal,
                .b = parameters(gpt_.tokens),
                .b_transposed = true,
                .c = logits,
                .m = rows,
                .n = gpt_.shape.vocabulary,
                .k = width});
}

const float* Layers::HeadChunks(Parameters parameters, Gradients* gradients, const Batch& batch,
                                const void* input, const float* loss_scale, void* input_gradient) {
  const int64_t tokens = batch.rows(), width = gpt_.shape.width;
  const Target logits = {space_->logits, LogitsDtype(device_, options_.compute), 0};
  Target table, norm_weight, norm_bias;
  if (gradients != nullptr) {
    table = (*gradients)(gpt_.tokens);
    norm_weight = (*gradients)(gpt_.norm.weight);
    norm_bias = (*gradients)(gpt_.norm.bias);
  }
  for (int64_t first = 0; first < tokens; first += space_->chunk_rows) {
    const int64_t rows = std::min(space_->chunk_rows, tokens - first);
    ChunkLogits(parameters, input, first, rows, logits);
    ops_->CrossEntropy({.logits = space_->logits,
                        .targets = batch.targets + first,
                        .losses = space_->losses + first,
                        .gradient = gradients == nullptr ? nullptr : space_->logit_gradient,
                        .gradient_scale = 1 / static_cast<float>(tokens),
                        .loss_scale = loss_scale,
                        .rows = rows,
                        .vocabulary = gpt_.shape.vocabulary});
    if (gradients == nullptr) continue;

    WeightGradient(space_->logit_gradient, space_->normal, rows, width, gpt_.shape.vocabulary,
                   table, {});
    ops_->Matmul(InputGradient(space_->logit_gradient, parameters(gpt_.tokens), rows, width,
                               gpt_.shape.vocabulary, space_->normal_gradient));
    NormBackward(Norm(parameters, gpt_.norm, Row(input, first), space_->norm, nullptr, rows),
                 space_->normal_gradient, nullptr, const_cast<void*>(Row(input_gradient, first)),
                 norm_weight, norm_bias);
    table.beta = norm_weight.beta = norm_bias.beta = 1;
  }
  ops_->Mean(space_->losses, tokens, space_->loss);
  return space_->loss;
}

const float* Layers::HeadLoss(Parameters parameters, const Batch& batch, const void* input) {
  return HeadChunks(parameters, nullptr, batch, input, nullptr, nullptr);
}

const float* Layers::HeadBackward(Parameters parameters, Gradients gradients, const Batch& batch,
                                  const void* input, const float* loss_scale,
                                  void* input_gradient) {
  return HeadChunks(parameters, &gradients, batch, input, loss_scale, input_gradient);
}

std::span<const float> Layers::LastLogits(Parameters parameters, const Batch& batch,
                                          const void* input) {
  const int64_t vocabulary = gpt_.shape.vocabulary;
  auto* const logits = space_->last_logits;
  ChunkLogits(parameters, input, batch.rows() - 1, 1, {logits, DType::kFloat32, 0});
  Stream stream = device_.CallerStream();
  stream.Copy(host_logits_.data(), logits, vocabulary * int64_t{sizeof(float)});
  stream.WaitIdle();
  return {reinterpret_cast<const float*>(host_logits_.data()), static_cast<size_t>(vocabulary)};
}

}  // namespace ebb::gpt
