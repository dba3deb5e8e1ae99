#include "ebb/runtime/planner/activations.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ebb::planner {

namespace {

constexpr double kBytesMax = 0x1p53;

absl::Status TooMany(const Pass& pass) {
  return absl::InvalidArgumentError(absl::StrCat("activations of ", pass.sequences,
                                                 " sequences of ", pass.context,
                                                 " tokens take more than 2^53 bytes: take fewer"));
}

// Pass::torch.
absl::StatusOr<Activations> OfTorch(const Model& model, const Pass& pass) {
  const double context = static_cast<double>(pass.context),
               tokens = static_cast<double>(pass.sequences) * context,
               rounds = static_cast<double>(pass.micro_batches_per_round),
               element = SizeOf(pass.compute), width = static_cast<double>(model.width),
               vocabulary = static_cast<double>(model.vocabulary);
  double kept = 0, most = 0, gradients = 0, boundaries = 0, mask = 0;
  // Logits in fp32 and their gradients; or logits, and gradients that one kernel writes.
  double loss = 12 * vocabulary + (4 + 2 * element) * width;
  if (pass.compiled) {
    constexpr double kRows = 28;  // of the loss and the last norm
    loss = 2 * element * vocabulary + element * width + kRows;
    mask = element * context * context;  // of one sequence
    boundaries = element * width;        // the embedding's output
  }
  for (const ModelVisit& visit : model.visits) {
    const double of_visit = pass.compiled ? element * static_cast<double>(visit.compiled_kept) +
                                                static_cast<double>(visit.compiled_kept_bytes)
                                          : element * static_cast<double>(visit.torch_kept) +
                                                static_cast<double>(visit.torch_kept_bytes);
    kept += of_visit;
    most = std::max(most, of_visit);
    gradients =
        std::max(gradients, element * static_cast<double>(pass.compiled ? visit.compiled_gradients
                                                                        : visit.torch_gradients));
    if (visit.is_block && pass.recompute) boundaries += element * width;
  }
  const double kept_bytes = (pass.recompute ? 0 : tokens * kept * rounds) + mask,
               scratch = tokens * std::max(loss, gradients + (pass.recompute ? most : 0)),
               batch = 8 * tokens * static_cast<double>(pass.micro_batches) +
                       tokens * boundaries * rounds;
  if (kept_bytes + scratch + batch > kBytesMax) return TooMany(pass);
  return Activations{.kept = static_cast<int64_t>(kept_bytes),
                     .scratch = static_cast<int64_t>(scratch),
                     .batch = static_cast<int64_t>(batch)};
}

}  // namespace

absl::StatusOr<Activations> ActivationsOf(const Model& model, const Pass& pass) {
  if (pass.torch) return OfTorch(model, pass);
  const double tokens = static_cast<double>(pass.sequences) * static_cast<double>(pass.context),
               positions = pass.fused_attention ? 0 : static_cast<double>(pass.context),
               element = SizeOf(pass.compute), ranks = model.tensor_ranks;
  double kept = 0, kept_most = 0, scratch = 0, dequantized = 0;
  for (const ModelVisit& visit : model.visits) {
    const double shared = pass.sequence_parallel ? static_cast<double>(visit.kept_whole) : 0,
                 of_visit = element * (static_cast<double>(visit.kept) - shared * (1 - 1 / ranks) +
                                       static_cast<double>(visit.kept_a_position) * positions) +
                            static_cast<double>(visit.kept_bytes);
    dequantized = std::max(dequantized, element * static_cast<double>(visit.dequantized_most));
    kept += of_visit;
    kept_most = std::max(kept_most, of_visit);
    scratch =
        std::max(scratch, element * (static_cast<double>(visit.scratch) +
                                     static_cast<double>(visit.scratch_a_position) * positions));
  }
  if (pass.whole_logits)
    scratch += (4 + element) * std::ceil(static_cast<double>(model.vocabulary) / ranks);
  const double rounds = static_cast<double>(pass.micro_batches_per_round);
  const double kept_bytes = tokens * (pass.recompute ? kept_most : kept * rounds),
               scratch_bytes = tokens * scratch + dequantized,
               batch_bytes = 8 * tokens * static_cast<double>(pass.micro_batches),
               rows = pass.sequence_parallel ? std::ceil(tokens / ranks) : tokens,
               boundary = rows * static_cast<double>(model.width) * element,
               boundaries = boundary * rounds * static_cast<double>(model.visits.size());
  if (kept_bytes + scratch_bytes + batch_bytes + boundaries > kBytesMax) return TooMany(pass);
  if (pass.own_activations >= 0)
    return Activations{.boundary = static_cast<int64_t>(boundary), .kept = pass.own_activations};
  return Activations{.boundary = static_cast<int64_t>(boundary),
                     .kept = static_cast<int64_t>(kept_bytes),
                     .scratch = static_cast<int64_t>(scratch_bytes),
                     .batch = static_cast<int64_t>(batch_bytes)};
}

}  // namespace ebb::planner
