// The functions of layers.h for the head: logits, their loss, and the gradients of both.
#include <algorithm>

#include "model/layers.h"
#include "model/space.h"

namespace ebb::gpt {
namespace {

const void* At(const void* numbers, DType dtype, int64_t index) {
  return static_cast<const char*>(numbers) + index * SizeOf(dtype);
}

}  // namespace

void Layers::Logits(Parameters parameters, const void* normal, int64_t rows, const Target& logits) {
  ops_->Matmul({.a = normal,
                .b = parameters(gpt_.tokens),
                .b_transposed = true,
                .c = logits,
                .m = rows,
                .n = share_.vocabulary,
                .k = gpt_.shape.width});
}

// A chunk has rows of each tensor rank that has a part of the batch's rows:
//
//   batch   rank 0 [ . . first ... first + own . . ]  rank 1 [ . . first ... first + own . . ]
//   chunk          [ own rows                       |         own rows                      ]
void Layers::ChunkLosses(const CrossEntropyArrays& arrays, const Batch& batch, int64_t first,
                         int64_t own) {
  const int64_t parts = options_.tensor.row_parts(), chunk = own * parts;
  const auto each_part = [&](void (Ops::*call)(const CrossEntropyArrays&)) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t in_batch = part * OwnRows(batch) + first, in_chunk = part * own,
                    element = in_chunk * share_.vocabulary;
      CrossEntropyArrays of_part = arrays;
      of_part.logits = At(arrays.logits, LogitsDtype(device_, options_.compute), element);
      of_part.targets = batch.targets + in_batch;
      of_part.losses = space_->losses + in_batch;
      if (arrays.gradient != nullptr)
        of_part.gradient = const_cast<void*>(At(arrays.gradient, options_.compute, element));
      of_part.rows = own;
      if (options_.tensor.cuts()) {
        const RowTerms& terms = space_->terms;
        of_part.terms = {.top = terms.top + in_chunk,
                         .own_top = terms.own_top + in_chunk,
                         .sum = terms.sum + in_chunk,
                         .at_target = terms.sum + chunk + in_chunk};
      }
      (ops_->*call)(of_part);
    }
  };
  if (options_.tensor.cuts()) {
    each_part(&Ops::LogitTerms);
    ReduceNumbers(space_->terms.top, chunk, ReduceOp::kMax);
    each_part(&Ops::LogitSums);
    ReduceNumbers(space_->terms.sum, 2 * chunk, ReduceOp::kSum);
  }
  each_part(&Ops::CrossEntropy);
}

const float* Layers::HeadChunks(Parameters parameters, Gradients* gradients, const Batch& batch,
                                const void* input, const float* loss_scale, void* input_gradient) {
  const int64_t tokens = batch.rows(), own_tokens = OwnRows(batch), width = gpt_.shape.width,
                parts = options_.tensor.row_parts(), own_chunk = space_->chunk_rows / parts;
  void* const own_normal = parts > 1 ? space_->own_normal : space_->normal;
  const Target logits = {space_->logits, LogitsDtype(device_, options_.compute), 0};
  Target table, norm_weight, norm_bias;
  if (gradients != nullptr) {
    table = (*gradients)(gpt_.tokens);
    norm_weight = (*gradients)(gpt_.norm.weight);
    norm_bias = (*gradients)(gpt_.norm.bias);
  }
  for (int64_t first = 0; first < own_tokens; first += own_chunk) {
    const int64_t own = std::min(own_chunk, own_tokens - first), rows = own * parts;
    ops_->Norm(Norm(parameters, gpt_.norm, Row(input, first), space_->norm, own_normal, own));
    const void* const normal = Gathered(own_normal, own, space_->normal);
    Logits(parameters, normal, rows, logits);
    ChunkLosses({.logits = space_->logits,
                 .gradient = gradients == nullptr ? nullptr : space_->logit_gradient,
                 .gradient_scale = 1 / static_cast<float>(tokens),
                 .loss_scale = loss_scale,
                 .vocabulary = share_.vocabulary,
                 .first_token = share_.first_token},
                batch, first, own);
    if (gradients == nullptr) continue;

    WeightGradient(space_->logit_gradient, normal, rows, width, share_.vocabulary, table, {});
    ops_->Matmul(InputGradient(space_->logit_gradient, parameters(gpt_.tokens), rows, width,
                               share_.vocabulary, space_->normal_gradient));
    NormBackward(Norm(parameters, gpt_.norm, Row(input, first), space_->norm, nullptr, own),
                 SumTerms(space_->normal_gradient, own, own_normal), nullptr,
                 const_cast<void*>(Row(input_gradient, first)), norm_weight, norm_bias);
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
                                          const void* input, int64_t padding) {
  const int64_t own = OwnRows(batch), row = batch.rows() - 1 - padding;
  const TensorSplit& tensor = options_.tensor;
  const void* last = Row(input, row % own);
  if (tensor.divides_rows) {  // one rank has it
    last = Gathered(last, 1, space_->last_rows);
    last = Row(last, row / own);
  }
  ops_->Norm(Norm(parameters, gpt_.norm, last, space_->norm, space_->normal, 1));
  // Each rank's part has the place of the largest one.
  const int64_t largest = ShareOf(gpt_.shape, 0, tensor.ranks).vocabulary,
                count = tensor.ranks * largest;
  float* const logits = tensor.cuts() ? space_->part_of_logits : space_->last_logits;
  Logits(parameters, space_->normal, 1, {logits, DType::kFloat32, 0});
  if (tensor.cuts() && !alone_) {
    const int64_t part[] = {largest}, all[] = {count};
    tensor_.AllGather({.data = logits, .shape = part}, {.data = space_->last_logits, .shape = all});
  }
  Stream stream = device_.CallerStream();
  stream.Copy(host_logits_.data(), space_->last_logits, count * int64_t{sizeof(float)});
  stream.WaitIdle();
  float* const host = reinterpret_cast<float*>(host_logits_.data());
  for (int rank = 1; rank < tensor.ranks; ++rank) {
    const TensorShare share = ShareOf(gpt_.shape, rank, tensor.ranks);
    std::copy_n(host + rank * largest, share.vocabulary, host + share.first_token);
  }
  return {host, static_cast<size_t>(gpt_.shape.vocabulary)};
}

}  // namespace ebb::gpt
