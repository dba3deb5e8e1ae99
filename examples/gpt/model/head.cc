// The head of layers.h: final norm, logits against the embedding's table, loss, and their backward,
// in chunks of rows.
#include <algorithm>
#include <optional>

#include "model/layers.h"
#include "model/layers_space.h"

namespace ebb::gpt {
namespace {

const void* Row(const void* matrix, int64_t row, int64_t width, DType dtype) {
  return static_cast<const char*>(matrix) + row * width * SizeOf(dtype);
}

}  // namespace

void Layers::ChunkLogits(Parameters parameters, const void* input, int64_t first, int64_t rows,
                         Target logits) {
  const int64_t width = gpt_.shape.width;
  ops_->Norm({.input = Row(input, first, width, options_.compute),
              .weight = parameters(gpt_.norm_weight),
              .bias = parameters(gpt_.norm_bias),
              .output = space_->normal,
              .mean = space_->mean,
              .reciprocal_deviation = space_->deviation,
              .rows = rows,
              .width = width});
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
    norm_weight = (*gradients)(gpt_.norm_weight);
    norm_bias = (*gradients)(gpt_.norm_bias);
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

    ops_->Matmul({.a = space_->logit_gradient,
                  .a_transposed = true,
                  .b = space_->normal,
                  .c = table,
                  .m = gpt_.shape.vocabulary,
                  .n = width,
                  .k = rows});
    ops_->Matmul({.a = space_->logit_gradient,
                  .b = parameters(gpt_.tokens),
                  .c = {space_->normal_gradient, options_.compute, 0},
                  .m = rows,
                  .n = width,
                  .k = gpt_.shape.vocabulary});
    ops_->NormBackward(
        {.input = Row(input, first, width, options_.compute),
         .weight = parameters(gpt_.norm_weight),
         .mean = space_->mean,
         .reciprocal_deviation = space_->deviation,
         .output_gradient = space_->normal_gradient,
         .input_gradient = const_cast<void*>(Row(input_gradient, first, width, options_.compute)),
         .weight_gradient = norm_weight,
         .bias_gradient = norm_bias,
         .rows = rows,
         .width = width});
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
