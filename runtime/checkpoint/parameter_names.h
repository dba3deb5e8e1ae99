// The names and the orientation of a model's parameters in other programs and in Ebb's examples.
//
//   GPT-2 in Hugging Face's files                  examples/gpt
//   transformer.h.0.attn.c_attn.weight [in, out]   block0.qkv.weight [out, in]   Conv1D: transposed
//   transformer.wte.weight, lm_head.weight         embedding.tokens              tied: once
//
// All other models, Llama among them, keep the names and the orientation of their files.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/parameter_files.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

// The name of a tensor in another program.
struct NameElsewhere {
  std::string name;
  bool transposed = false;
};
// Hugging Face's name for Ebb's name, and the reverse. Nothing if GPT-2 has no such parameter.
std::optional<NameElsewhere> Gpt2NameOutside(std::string_view own);
std::optional<NameElsewhere> Gpt2NameInside(std::string_view outside);

enum class NameDirection : uint8_t { kInside, kOutside };
// Whether the tensors have GPT-2's names: as the option says, or for kAuto if all names are known.
bool AreOfGpt2(std::span<const TensorInfo> tensors, ParameterNames names, NameDirection direction);
// The name on the other side, if the tensor is GPT-2's; else its own. kInvalidArgument: GPT-2 has
// no such tensor, or one of another shape. `owner`: for messages.
absl::StatusOr<NameElsewhere> NameOf(const TensorInfo& tensor, bool gpt2, NameDirection direction,
                                     std::string_view owner);

// The tensors of `source` under Ebb's names, some of them transposed. Buffers (GPT-2's causal
// masks, Llama's rotary frequencies) are left out. A tied head is left out too, and must equal the
// table. kInvalidArgument: a name that kGpt2 does not know.
absl::StatusOr<std::unique_ptr<TensorSource>> NamedInside(std::unique_ptr<TensorSource> source,
                                                          ParameterNames names);
// Its values, without states, under the names of Hugging Face, all numbers in `dtype`.
absl::StatusOr<std::unique_ptr<TensorSource>> NamedOutside(std::unique_ptr<TensorSource> source,
                                                           ParameterNames names, DType dtype);

}  // namespace ebb
