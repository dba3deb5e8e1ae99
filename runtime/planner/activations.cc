#include "ebb/runtime/planner/activations.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ebb::planner {

absl::StatusOr<Activations> ActivationsOf(const Model& model, const Pass& pass) {
  constexpr double kBytesMax = 0x1p53;
  const double tokens = static_cast<double>(pass.sequences) * static_cast<double>(pass.context),
               positions = pass.fused_attention ? 0 : static_cast<double>(pass.context),
               element = SizeOf(pass.compute);
  double kept = 0, kept_most = 0, scratch = 0;
  for (const ModelVisit& visit : model.visits) {
    const double of_visit = element * (static_cast<double>(visit.kept) +
                                       static_cast<double>(visit.kept_a_position) * positions) +
                            static_cast<double>(visit.kept_bytes);
    kept += of_visit;
    kept_most = std::max(kept_most, of_visit);
    scratch =
        std::max(scratch, element * (static_cast<double>(visit.scratch) +
                                     static_cast<double>(visit.scratch_a_position) * positions));
  }
  if (pass.whole_logits) scratch += (4 + element) * static_cast<double>(model.vocabulary);
  const double rounds = static_cast<double>(pass.micro_batches_per_round);
  const double kept_bytes = tokens * (pass.recompute ? kept_most : kept * rounds),
               scratch_bytes = tokens * scratch,
               batch_bytes = 8 * tokens * static_cast<double>(pass.micro_batches),
               boundary = tokens * static_cast<double>(model.width) * element,
               boundaries = boundary * rounds * static_cast<double>(model.visits.size());
  if (kept_bytes + scratch_bytes + batch_bytes + boundaries > kBytesMax)
    return absl::InvalidArgumentError(
        absl::StrCat("activations of ", pass.sequences, " sequences of ", pass.context,
                     " tokens take more than 2^53 bytes: take fewer"));
  if (pass.own_activations >= 0)
    return Activations{.boundary = static_cast<int64_t>(boundary), .kept = pass.own_activations};
  return Activations{.boundary = static_cast<int64_t>(boundary),
                     .kept = static_cast<int64_t>(kept_bytes),
                     .scratch = static_cast<int64_t>(scratch_bytes),
                     .batch = static_cast<int64_t>(batch_bytes)};
}

}  // namespace ebb::planner
