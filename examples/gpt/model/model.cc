#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <optional>

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

absl::Status Validate(const GptShape& shape, const TensorSplit& tensor) {
  if (shape.heads < tensor.ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tensor ", tensor.ranks, " cuts layers by heads, and --heads is ",
                     shape.heads, ": use at most ", shape.heads, " tensor ranks"));
  }
  if (tensor.divides_rows && shape.context % tensor.ranks != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--sequence-parallel divides the rows of a sequence over --tensor ", tensor.ranks,
        " ranks, and --context is ", shape.context, ": use a multiple of ", tensor.ranks));
  }
  return absl::OkStatus();
}

namespace {

// Hidden columns come in fours, which fill a vector and have the alignment of one.
constexpr int64_t kHiddenMultiple = 4;

struct Range {
  int64_t begin = 0, count = 0;
};

// A rank's part of them, as Split divides.
Range RangeOf(int64_t multiples, int rank, int ranks) {
  const int64_t each = multiples / ranks, more = multiples % ranks;
  return {rank * each + std::min<int64_t>(rank, more), each + (rank < more ? 1 : 0)};
}

// Adds parameters with their cuts.
class Declaration {
 public:
  using Cut = std::optional<Split>;
  Declaration(const GptOptions& options, ModelSpec& spec) : options_(options), spec_(spec) {}

  ParameterId Matrix(UnitId unit, std::string name, std::vector<int64_t> shape,
                     const Initialiser& init, const Cut& cut) const {
    const bool cuts = options_.tensor.cuts();
    return spec_.Add(unit, {.name = std::move(name),
                            .shape = std::move(shape),
                            .init = init,
                            .matrix_rows = cut && !cuts ? cut->parts : std::vector<int64_t>(),
                            .split = cuts ? cut : std::nullopt});
  }
  // One that is not cut is added to rows, of which each rank may have a part.
  ParameterId Vector(UnitId unit, std::string name, int64_t size, float value,
                     const Cut& cut) const {
    return spec_.Add(unit, {.name = std::move(name),
                            .shape = {size},
                            .init = Constant(value),
                            .group = options_.vector_group,
                            .split = options_.tensor.cuts() ? cut : std::nullopt,
                            .sums_gradient = options_.tensor.divides_rows && !cut});
  }
  WeightAndBias Norm(UnitId unit, const std::string& name) const {
    const int64_t width = options_.shape.width;
    return {Vector(unit, name + ".weight", width, 1, std::nullopt),
            Vector(unit, name + ".bias", width, 0, std::nullopt)};
  }
  // Cut by its outputs, with the bias; or by its inputs, with the whole bias added to the sum.
  WeightAndBias Linear(UnitId unit, const std::string& name, int64_t outputs, int64_t inputs,
                       const Initialiser& init, const Split& cut) const {
    return {Matrix(unit, name + ".weight", {outputs, inputs}, init, cut),
            Vector(unit, name + ".bias", outputs, 0, cut.dimension == 0 ? Cut(cut) : std::nullopt)};
  }

 private:
  const GptOptions& options_;
  ModelSpec& spec_;
};

}  // namespace

TensorShare ShareOf(const GptShape& shape, int rank, int ranks) {
  const int64_t heads = RangeOf(shape.heads, rank, ranks).count;
  const Range tokens = RangeOf(shape.vocabulary, rank, ranks);
  return {.heads = heads,
          .width = heads * (shape.width / shape.heads),
          .hidden = kHiddenMultiple * RangeOf(4 * shape.width / kHiddenMultiple, rank, ranks).count,
          .vocabulary = tokens.count,
          .first_token = tokens.begin};
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
  const Declaration add(options, spec);
  gpt.tokens = add.Matrix(gpt.embedding, "embedding.tokens", {shape.vocabulary, width}, small,
                          Split{.dimension = 0});
  gpt.positions =
      add.Matrix(gpt.embedding, "embedding.positions", {shape.context, width}, small, std::nullopt);
  const int64_t of_head = width / shape.heads;
  const Split qkv = {.dimension = 0, .parts = {width, width, width}, .multiple = of_head},
              heads = {.dimension = 1, .multiple = of_head},
              up = {.dimension = 0, .multiple = kHiddenMultiple},
              down = {.dimension = 1, .multiple = kHiddenMultiple};
  gpt.norm = add.Norm(gpt.embedding, "final_norm");
  for (int64_t i = 0; i < shape.layers; ++i) {
    const std::string name = absl::StrCat("block", i);
    const UnitId unit = spec.AddUnit(name);
    gpt.blocks.push_back(
        {.unit = unit,  // parameters are added in this order
         .norm1 = add.Norm(unit, name + ".norm1"),
         .qkv = add.Linear(unit, name + ".qkv", 3 * width, width, small, qkv),
         .projection = add.Linear(unit, name + ".projection", width, width, residual, heads),
         .norm2 = add.Norm(unit, name + ".norm2"),
         .up = add.Linear(unit, name + ".up", 4 * width, width, small, up),
         .down = add.Linear(unit, name + ".down", width, 4 * width, residual, down)});
  }

  const ExchangedBytes& exchanged = options.exchanged;
  spec.forward.push_back({.unit = gpt.embedding,
                          .output_bytes = options.boundary_bytes,
                          .forward_tensor_bytes = exchanged.embedding,
                          .backward_tensor_bytes = exchanged.embedding_backward});
  for (const BlockIds& block : gpt.blocks) {
    spec.forward.push_back({.unit = block.unit,
                            .output_bytes = options.boundary_bytes,
                            .forward_tensor_bytes = exchanged.block,
                            .backward_tensor_bytes = exchanged.block_backward});
  }
  spec.forward.push_back({.unit = gpt.embedding, .backward_tensor_bytes = exchanged.head});
  return gpt;
}

}  // namespace ebb::gpt
