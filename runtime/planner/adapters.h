// The part that trains of a model if not all of it does: the adapters of LoRA (Hu et al., arXiv 2106.09685),
// beside a base that is frozen, and may be quantised to 4 bits (QLoRA, Dettmers et al., arXiv
// 2305.14314).
//
//   y = W x + B (A x)     W {out, in} is frozen; A {rank, in} and B {out, rank} train
//
// Matrices that are one in the files of a model, such as queries, keys and values of GPT-2, have one
// A for all. Each expert has adapters of its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model.h"

namespace ebb::planner {

struct Adapters {
  int64_t rank = 0;
  // "q_proj", "v_proj" and so on, or also the names in the files of GPT-2, GPT-NeoX, Falcon and Phi.
  // "all-linear": every matrix of a block, without routers.
  std::vector<std::string> modules = {"all-linear"};
};

inline constexpr int64_t kAdapterRankMax = 1 << 16;

// Freezes the model and adds the adapters. kInvalidArgument: the model has no such module.
absl::StatusOr<Model> WithAdapters(Model model, const Adapters& adapters);

// The bytes of bitsandbytes for the matrices of blocks, which are frozen: half a byte for each
// element, and a factor of 4 bytes for each 64 (not quantised again). Embedding, head, routers,
// norms and adapters keep their dtypes. A product first makes its matrix of 16 bits.
Model WithQuantizedBase(Model model);

}  // namespace ebb::planner
