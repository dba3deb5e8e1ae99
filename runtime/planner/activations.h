// What activations take of a rank's device, as a trainer like examples/gpt lays them out:
//
//   boundaries  what goes from visit to visit, one a visit and micro-batch of a round; the engine's, which may keep
//               them in RAM or on NVMe
//   kept        what each block keeps of its forward for its backward: outputs of products and of attention, and a
//               few numbers a row. Outputs of norms and of activation functions are made again, which takes a pass
//               over memory and no product. Recomputing keeps those of one block at a time
//   scratch     what a block's pass has in hand, shared by all
//   batch       tokens and targets
//
// Of a token and block, in elements of the compute dtype, with w the width, q and k the widths of queries and of keys,
// f that of feed-forward and e the experts that a token goes through (1 without experts):
//
//                  kept                                  scratch
//   GPT-2          q + 2k + q + w + f                    2w + 2f
//   gated (Llama)  q + 2k + q + w + 2ef                  2w + 4ef
//   not fused      heads for each position of the context, kept, and 2 heads of scratch
//
// The head's logits are made in chunks that fit in that scratch; a trainer that holds them whole has fp32 logits and
// gradients of the compute dtype beside it (Pass::whole_logits).
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model.h"

namespace ebb::planner {

// Bytes of a rank. `boundary`: of one visit and micro-batch.
struct Activations {
  int64_t boundary = 0;
  int64_t kept = 0, scratch = 0, batch = 0;
  int64_t workspace() const { return kept + scratch + batch; }
};

// kInvalidArgument: more than 2^53 bytes.
absl::StatusOr<Activations> ActivationsOf(const Model& model, const Pass& pass);

}  // namespace ebb::planner
