// The memory of activations on a rank's device, as a trainer like examples/gpt lays them out:
//
//   boundaries  the tensors between visits, one for each visit and micro-batch of a round. The
//               engine owns them and may keep them in RAM or on NVMe
//   kept        the tensors that a block's forward keeps for its backward: outputs of products and
//               of attention, and a few numbers a row. Backward computes outputs of norms and of
//               activation functions again, in a pass over memory without a product. With
//               recomputing, one block at a time has kept tensors
//   scratch     the temporary memory of a block's pass, shared by all blocks
//   batch       tokens and targets
//
// For one token and block, in elements of the compute dtype. w is the width, q and k are the widths
// of queries and of keys, f is the width of feed-forward, and e is the number of experts of a token
// (1 without experts):
//
//                  kept                                  scratch
//   GPT-2          q + 2k + q + w + f                    2w + 2f
//   gated (Llama)  q + 2k + q + w + 2ef                  2w + 4ef
//   not fused      also, for each position of the context: heads kept, and 2 heads of scratch
//
// The head computes its logits in chunks that fit in that scratch. A trainer with whole logits
// (Pass::whole_logits) holds fp32 logits, and gradients of the compute dtype, beside the scratch.
//
// A tensor rank has its part of q, k, f and the heads. With Pass::sequence_parallel it also has only
// its rows of w and of boundaries, but scratch, where all rows are gathered, stays.
//
// Pass::torch: a model of transformers under eager torch, with scaled_dot_product_attention. Its
// boundaries are not the engine's. Bytes of a token in 16 bits, with h heads, as
// ebb.count_activations counts them:
//
//                  kept by a block                                  gradients in its backward
//   GPT-2          20w + 10f + 4h                                    4f + 2w
//   GPT-NeoX       16w + 4f + 4h                                     4f + 2w
//   Llama          16w + 4q + 4k + 8f + 4h                           6f + 8w
//   Qwen 3         also 6q + 6k for the norms of heads; Gemma: also 4w
//
// With Pass::compiled, what torch.compile's partitioner saves for backward, of gated models: 8w + 8q +
// 6f + 4h (Qwen 3 also 2q + 2k), the embedding's output, a mask of context x context and 4 bytes for
// each word; gradients in a block's backward 6f + 4w.
//
// The eager loss takes 12 bytes for each word of the vocabulary, and the last norm 8w. The peak is where the
// loss or a block's backward begins.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model.h"

namespace ebb::planner {

// Bytes of a rank. `boundary`: for one visit and micro-batch.
struct Activations {
  int64_t boundary = 0;
  int64_t kept = 0, scratch = 0, batch = 0;
  int64_t workspace() const { return kept + scratch + batch; }
};

// kInvalidArgument: more than 2^53 bytes.
absl::StatusOr<Activations> ActivationsOf(const Model& model, const Pass& pass);

}  // namespace ebb::planner
