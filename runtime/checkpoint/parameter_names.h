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

// The tensors of `source` under other names, some of them transposed. Buffers (GPT-2's causal
// masks, Llama's rotary frequencies) are left out. A tied head is left out too, and must equal the
// table. kInvalidArgument: a name that kGpt2 does not know.
absl::StatusOr<std::unique_ptr<TensorSource>> Renamed(std::unique_ptr<TensorSource> source,
                                                      ParameterNames names,
                                                      NameDirection direction);

}  // namespace ebb
