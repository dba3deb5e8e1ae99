#include "model/model.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace ebb::gpt {

absl::Status Validate(const GptShape& shape) {
  struct Field {
    const char* flag;
    int64_t value, least, most;
  };
  for (const Field& field :
       {Field{"--layers", shape.layers, 1, 10'000}, Field{"--heads", shape.heads, 1, 10'000},
        Field{"--width", shape.width, 1, 1'000'000},
        Field{"--context", shape.context, 1, 1'000'000},
        Field{"--vocabulary", shape.vocabulary, 256, 10'000'000}}) {
    if (field.value < field.least || field.value > field.most) {
      return absl::InvalidArgumentError(absl::StrCat(
          field.flag, " is ", field.value, "; it must be from ", field.least, " to ", field.most));
    }
  }
  if (shape.width % shape.heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--heads ", shape.heads,
                                                   " does not divide --width ", shape.width,
                                                   "; each head needs the same number of columns"));
  }
  return absl::OkStatus();
}

Gpt Declare(const GptOptions& options, ModelSpec& spec) {
  const GptShape& shape = options.shape;
  const int64_t width = shape.width;
  const Initialiser small = Normal(0.02f, options.seed);
  // Each block adds two projections to the residual stream, so their variance is that of one
  // (GPT-2, section 2.3).
  const Initialiser residual =
      Normal(0.02f / std::sqrt(2.0f * static_cast<float>(shape.layers)), options.seed);

  Gpt gpt = {.shape = shape, .embedding = spec.AddUnit("embedding"), .norm = {}, .blocks = {}};
  const auto matrix = [&](UnitId unit, std::string name, int64_t rows, int64_t columns,
                          const Initialiser& init, int64_t matrices = 1) {
    std::vector<int64_t> each;
    if (matrices > 1) each.assign(static_cast<size_t>(matrices), rows / matrices);
    return spec.Add(
        unit,
        {.name = std::move(name), .shape = {rows, columns}, .init = init, .matrix_rows = each});
  };
  const auto vector = [&](UnitId unit, std::string name, int64_t size, float value) {
    return spec.Add(unit, {.name = std::move(name),
                           .shape = {size},
                           .init = Constant(value),
                           .group = options.vector_group});
  };
  gpt.tokens = matrix(gpt.embedding, "embedding.tokens", shape.vocabulary, width, small);
  gpt.positions = matrix(gpt.embedding, "embedding.positions", shape.context, width, small);
  const auto norm = [&](UnitId unit, const std::string& name) -> WeightAndBias {
    return {vector(unit, name + ".weight", width, 1), vector(unit, name + ".bias", width, 0)};
  };
  const auto linear = [&](UnitId unit, const std::string& name, int64_t outputs, int64_t inputs,
                          const Initialiser& init, int64_t matrices = 1) -> WeightAndBias {
    return {matrix(unit, name + ".weight", outputs, inputs, init, matrices),
            vector(unit, name + ".bias", outputs, 0)};
  };
  gpt.norm = norm(gpt.embedding, "final_norm");
  for (int64_t i = 0; i < shape.layers; ++i) {
    const std::string name = absl::StrCat("block", i);
    const UnitId unit = spec.AddUnit(name);
    gpt.blocks.push_back(
        {.unit = unit,  // parameters are added in this order
         .norm1 = norm(unit, name + ".norm1"),
         .qkv = linear(unit, name + ".qkv", 3 * width, width, small, /*matrices=*/3),
         .projection = linear(unit, name + ".projection", width, width, residual),
         .norm2 = norm(unit, name + ".norm2"),
         .up = linear(unit, name + ".up", 4 * width, width, small),
         .down = linear(unit, name + ".down", width, 4 * width, residual)});
  }

  spec.forward.push_back({.unit = gpt.embedding, .output_bytes = options.boundary_bytes});
  for (const BlockIds& block : gpt.blocks) {
    spec.forward.push_back({.unit = block.unit, .output_bytes = options.boundary_bytes});
  }
  spec.forward.push_back({.unit = gpt.embedding});
  return gpt;
}

}  // namespace ebb::gpt
