#include "ebb/runtime/planner/model_shape.h"

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/nearest.h"
#include "ebb/runtime/planner/block_matrices.h"

namespace ebb::planner {
namespace {

// The parts that a model has beside its sizes.
enum class Block { kGpt2, kGated, kQwen2, kQwen3 };
struct NamedShape {
  const char* name;
  Block block;
  bool tied_head;
  int64_t layers, width, heads, key_value_heads, feed_forward, vocabulary, context;
  int64_t experts = 1, experts_of_token = 1;
};
using enum Block;
constexpr NamedShape kNamed[] = {
    {"gpt2", kGpt2, true, 12, 768, 12, 12, 3072, 50257, 1024},
    {"gpt2-medium", kGpt2, true, 24, 1024, 16, 16, 4096, 50257, 1024},
    {"gpt2-large", kGpt2, true, 36, 1280, 20, 20, 5120, 50257, 1024},
    {"gpt2-xl", kGpt2, true, 48, 1600, 25, 25, 6400, 50257, 1024},
    {"gpt3-175b", kGpt2, true, 96, 12288, 96, 96, 49152, 50257, 2048},
    {"llama-2-7b", kGated, false, 32, 4096, 32, 32, 11008, 32000, 4096},
    {"llama-2-13b", kGated, false, 40, 5120, 40, 40, 13824, 32000, 4096},
    {"llama-2-70b", kGated, false, 80, 8192, 64, 8, 28672, 32000, 4096},
    {"llama-3-8b", kGated, false, 32, 4096, 32, 8, 14336, 128256, 8192},
    {"llama-3-70b", kGated, false, 80, 8192, 64, 8, 28672, 128256, 8192},
    {"llama-3-405b", kGated, false, 126, 16384, 128, 8, 53248, 128256, 131072},
    {"mistral-7b", kGated, false, 32, 4096, 32, 8, 14336, 32000, 32768},
    {"mixtral-8x7b", kGated, false, 32, 4096, 32, 8, 14336, 32000, 32768, 8, 2},
    {"mixtral-8x22b", kGated, false, 56, 6144, 48, 8, 16384, 32768, 65536, 8, 2},
    {"qwen2.5-0.5b", kQwen2, true, 24, 896, 14, 2, 4864, 151936, 32768},
    {"qwen2.5-1.5b", kQwen2, true, 28, 1536, 12, 2, 8960, 151936, 32768},
    {"qwen2.5-3b", kQwen2, true, 36, 2048, 16, 2, 11008, 151936, 32768},
    {"qwen2.5-7b", kQwen2, false, 28, 3584, 28, 4, 18944, 152064, 32768},
    {"qwen2.5-14b", kQwen2, false, 48, 5120, 40, 8, 13824, 152064, 32768},
    {"qwen2.5-32b", kQwen2, false, 64, 5120, 40, 8, 27648, 152064, 32768},
    {"qwen2.5-72b", kQwen2, false, 80, 8192, 64, 8, 29568, 152064, 32768},
    {"qwen3-0.6b", kQwen3, true, 28, 1024, 16, 8, 3072, 151936, 40960},
    {"qwen3-1.7b", kQwen3, true, 28, 2048, 16, 8, 6144, 151936, 40960},
    {"qwen3-4b", kQwen3, true, 36, 2560, 32, 8, 9728, 151936, 40960},
    {"qwen3-8b", kQwen3, false, 36, 4096, 32, 8, 12288, 151936, 40960},
    {"qwen3-14b", kQwen3, false, 40, 5120, 40, 8, 17408, 151936, 40960},
    {"qwen3-32b", kQwen3, false, 64, 5120, 64, 8, 25600, 151936, 40960},
    {"qwen3-30b-a3b", kQwen3, false, 48, 2048, 32, 4, 768, 151936, 40960, 128, 8},
    {"qwen3-235b-a22b", kQwen3, false, 94, 4096, 64, 4, 1536, 151936, 40960, 128, 8},
};

const std::vector<ModelShape>& All() {
  static const auto* const all = [] {
    auto* const shapes = new std::vector<ModelShape>;
    for (const NamedShape& of : kNamed) {
      shapes->push_back({.name = of.name,
                         .layers = of.layers,
                         .width = of.width,
                         .heads = of.heads,
                         .key_value_heads = of.key_value_heads,
                         .head_width = of.block == kQwen3 ? 128 : of.width / of.heads,
                         .feed_forward = of.feed_forward,
                         .vocabulary = of.vocabulary,
                         .context = of.context,
                         .experts = of.experts,
                         .experts_of_token = of.experts_of_token,
                         .tied_head = of.tied_head,
                         .query_biases = of.block == kQwen2,
                         .query_norms = of.block == kQwen3});
      if (of.block == kGpt2) shapes->back() = ModelShape::Gpt2(std::move(shapes->back()));
    }
    return shapes;
  }();
  return *all;
}

constexpr ModelSize kSizes[] = {
    {"layers", &ModelShape::layers, kUnitsMax - 2,
     "blocks; sizes describe a gated transformer, or replace the model's"},
    {"width", &ModelShape::width, 1 << 22, "width of the residual stream"},
    {"heads", &ModelShape::heads, 1 << 16, "attention heads"},
    {"key-value-heads", &ModelShape::key_value_heads, 1 << 16, "heads of keys and values"},
    {"head-width", &ModelShape::head_width, 1 << 16, "width of a head"},
    {"feed-forward", &ModelShape::feed_forward, 1 << 24, "width inside the feed-forward layer"},
    {"vocabulary", &ModelShape::vocabulary, 1 << 24, "tokens of the vocabulary"},
    {"context", &ModelShape::context, 1 << 28},
    {"experts", &ModelShape::experts, 1 << 14, "experts of a block"},
    {"experts-of-token", &ModelShape::experts_of_token, 1 << 14,
     "experts that a token goes through"},
    {"dense-layers", &ModelShape::dense_layers, kUnitsMax - 2, nullptr, false},
    {"dense-feed-forward", &ModelShape::dense_feed_forward, 1 << 24, nullptr, false},
    {"shared-feed-forward", &ModelShape::shared_feed_forward, 1 << 24, nullptr, false},
    {"query-rank", &ModelShape::query_rank, 1 << 20, nullptr, false},
    {"key-value-rank", &ModelShape::key_value_rank, 1 << 20, nullptr, false},
    {"rotary-width", &ModelShape::rotary_width, 1 << 16, nullptr, false},
    {"value-width", &ModelShape::value_width, 1 << 16, nullptr, false},
    {"window", &ModelShape::window, 1 << 28, nullptr, false},
    {"whole-every", &ModelShape::whole_every, 1 << 20, nullptr, false}};

absl::Status CheckSizes(const ModelShape& shape, int64_t least) {
  for (const ModelSize& size : kSizes) {
    if (shape.*size.of < (size.is_of_every ? least : 0) || shape.*size.of > size.most)
      return absl::InvalidArgumentError(
          absl::StrCat(size.name, " is ", shape.*size.of == 0 ? "missing, or " : "", shape.*size.of,
                       ": it must be from 1 to ", size.most));
  }
  return absl::OkStatus();
}

struct TensorRow {
  const char* name;
  std::vector<int64_t> shape;
  bool is_there = true;
  Over over = Over::kEqual;
  int64_t multiple = 1;  // of rows or columns on a rank
};
// `leading`: dimensions before the rows.
void Share(Over over, int64_t multiple, int leading, ModelTensor& tensor) {
  tensor.sums_gradient = over == Over::kTerms;
  if (over == Over::kRows || over == Over::kColumns)
    tensor.split =
        Split{.dimension = leading + (over == Over::kColumns ? 1 : 0), .multiple = multiple};
}
void AddRows(std::initializer_list<TensorRow> rows, ModelUnit& unit) {
  for (const TensorRow& row : rows) {
    if (!row.is_there) continue;
    ModelTensor& tensor = unit.tensors.emplace_back();
    tensor = {.name = absl::StrCat(unit.name, ".", row.name), .shape = row.shape};
    Share(row.over, row.multiple, /*leading=*/0, tensor);
  }
}
ModelUnit UnitOf(std::string name, std::initializer_list<TensorRow> rows) {
  ModelUnit unit{.name = std::move(name)};
  AddRows(rows, unit);
  return unit;
}

void AddMatrices(const std::vector<Matrix>& matrices, ModelUnit& unit) {
  const auto of = [&](const Matrix& matrix, std::vector<int64_t> shape, const char* suffix) {
    if (matrix.experts > 0) shape.insert(shape.begin(), matrix.experts);
    ModelTensor tensor{.name = absl::StrCat(unit.name, ".", matrix.name, suffix),
                       .shape = std::move(shape)};
    // The bias of a matrix that is cut by columns is added to the sum of all ranks.
    const bool is_bias = suffix[0] != 0;
    Share(is_bias && matrix.over == Over::kColumns ? Over::kEqual : matrix.over, matrix.multiple,
          matrix.experts > 0 ? 1 : 0, tensor);
    return tensor;
  };
  for (const Matrix& matrix : matrices) {
    unit.tensors.push_back(of(matrix, {matrix.rows, matrix.columns}, ""));
    unit.tensors.back().module = matrix.module;
    unit.tensors.back().joins_previous = matrix.joins_previous;
  }
  for (const Matrix& matrix : matrices) {
    if (matrix.has_bias) unit.tensors.push_back(of(matrix, {matrix.rows}, "_bias"));
  }
}

ModelUnit BlockOf(const ModelShape& s, int64_t layer) {
  ModelUnit unit{.name = absl::StrCat("block", layer)};
  for (int64_t norm = 1; norm <= s.block_norms; ++norm) {
    const std::string name = absl::StrCat("norm", norm), bias = name + "_bias";
    AddRows({{name.c_str(), {s.width}}, {bias.c_str(), {s.width}, s.norm_biases}}, unit);
  }
  AddMatrices(AttentionOf(s), unit);
  const bool is_latent = s.key_value_rank > 0;
  // Each rank's heads have a term of the gradient of a norm that all heads share.
  const int64_t group = s.heads / s.key_value_heads;
  AddRows({{"query_norm", {s.head_width}, s.query_norms, Over::kTerms},
           {"key_norm", {s.head_width}, s.query_norms, Over::kTerms},
           {"query_norm", {s.queries()}, s.whole_query_norms, Over::kRows, group * s.head_width},
           {"key_norm", {s.keys()}, s.whole_query_norms, Over::kRows, s.head_width},
           {"query_norm", {s.query_rank}, is_latent && s.query_rank > 0},
           {"key_value_norm", {s.key_value_rank}, is_latent},
           {"sinks", {s.heads}, s.sinks, Over::kRows, group}},
          unit);
  AddMatrices(FeedForwardOf(s, layer), unit);
  return unit;
}

// activations.h. `hidden`: widths inside feed-forward, of gate and up together.
void AddTorch(const ModelShape& s, int64_t hidden, int64_t attended, ModelVisit& visit) {
  const int64_t keys = s.key_value_rank > 0 ? s.queries() + attended : 2 * s.keys(),
                inside = s.gated ? hidden / 2 : hidden;
  visit.torch_kept = s.queries() + keys + attended + 2 * 2 * s.width;
  visit.torch_kept_bytes = 4 * s.heads;
  if (s.norm_biases) {
    visit.torch_kept_bytes += 8;
  } else {
    const int64_t others = std::max<int64_t>(0, s.block_norms - 2);  // after a product
    visit.torch_kept += others * s.width;
    visit.torch_kept_bytes += (2 + others) * (4 * s.width + 4);
    if (s.float_norms) visit.torch_kept_bytes += (2 + others) * 2 * s.width;
  }
  if (s.query_norms || s.whole_query_norms) {
    visit.torch_kept += s.queries() + s.keys();
    visit.torch_kept_bytes += 4 * (s.queries() + s.keys() + s.heads + s.key_value_heads);
  }
  if (s.gated) {
    visit.torch_kept += 4 * inside + (s.joined_queries ? s.queries() : 0);
  } else {
    // GPT-2's activation function is several operations; its dropouts keep something, too.
    visit.torch_kept += s.learned_positions ? 5 * inside + 2 * s.width : 2 * inside;
  }
  visit.torch_gradients = s.gated ? 3 * inside + 4 * s.width : 2 * inside + s.width;
  if (!s.gated || s.key_value_rank > 0 || s.experts > 1) return;
  // Keys and values are repeated for each head.
  const bool norms_heads = s.query_norms || s.whole_query_norms;
  visit.compiled_kept = 4 * s.width + 3 * s.queries() + attended + 3 * inside +
                        (norms_heads ? s.queries() + s.keys() : 0);
  visit.compiled_kept_bytes = 4 * s.heads + 4 * std::max<int64_t>(2, s.block_norms) +
                              (norms_heads ? 4 * (s.heads + s.key_value_heads) : 0);
  visit.compiled_gradients = 3 * inside + 2 * s.width;
}

// The sizes of what the first of so many tensor ranks, which has most, computes with.
ModelShape OfTensorRank(ModelShape s, int tensor_ranks) {
  if (tensor_ranks == 1) return s;
  const auto part = [&](int64_t all) { return (all + tensor_ranks - 1) / tensor_ranks; };
  const int64_t group = s.key_value_rank > 0 ? 1 : s.heads / s.key_value_heads;
  s.key_value_heads = part(s.key_value_heads);
  s.heads = s.key_value_rank > 0 ? part(s.heads) : group * s.key_value_heads;
  for (int64_t ModelShape::*const of : {&ModelShape::feed_forward, &ModelShape::dense_feed_forward,
                                        &ModelShape::shared_feed_forward, &ModelShape::vocabulary})
    s.*of = part(s.*of);
  return s;
}

ModelVisit VisitOfBlock(const ModelShape& s, int unit, int64_t layer) {
  const int64_t attended = s.heads * (s.key_value_rank > 0 ? s.value_width : s.head_width);
  ModelVisit visit{.unit = unit,
                   .is_block = true,
                   .products_a_position = static_cast<double>(s.queries() + attended),
                   .kept = attended,
                   // The sum of each row of scores; mean and deviation of two norms.
                   .kept_bytes = 4 * (s.heads + 4),
                   .kept_a_position = s.heads,
                   .scratch_a_position = 2 * s.heads};
  if (s.window > 0 && (layer + 1) % std::max<int64_t>(1, s.whole_every) != 0)
    visit.window = s.window;
  int64_t hidden = 0;
  const auto add = [&](const Matrix& matrix, bool is_hidden) {
    const int64_t used = matrix.experts > 0 ? s.experts_of_token : 1;
    visit.products += static_cast<double>(used) * static_cast<double>(matrix.rows) *
                      static_cast<double>(matrix.columns);
    if (!matrix.is_kept) return;
    visit.kept += used * matrix.rows;
    if (is_hidden) hidden += used * matrix.rows;
  };
  for (const Matrix& matrix : AttentionOf(s)) {
    add(matrix, false);
    if (matrix.over == Over::kEqual || matrix.over == Over::kColumns)
      visit.kept_whole += matrix.rows;
  }
  // Keys of latent attention are copied together for each head.
  if (s.key_value_rank > 0) visit.kept += s.queries();
  // Where attention and feed-forward run side by side, they have one input and one sum.
  visit.tensor_outputs = (s.block_norms == 1 ? 1 : 2) * s.width;
  visit.tensor_inputs = visit.tensor_outputs;
  if (s.key_value_rank > 0)
    visit.tensor_inputs +=
        (s.query_rank > 0 ? s.query_rank - s.width : 0) + s.key_value_rank + s.rotary_width;
  for (const Matrix& matrix : FeedForwardOf(s, layer)) add(matrix, true);
  visit.scratch = 2 * s.width + 2 * hidden;
  AddTorch(s, hidden, attended, visit);
  return visit;
}

}  // namespace

ModelShape ModelShape::Gpt2(ModelShape sizes) {
  sizes.gated = false;
  sizes.learned_positions = sizes.norm_biases = sizes.query_biases = sizes.projection_bias =
      sizes.feed_forward_biases = sizes.joined_queries = true;
  return sizes;
}

std::span<const ModelSize> ModelSizes() {
  return kSizes;
}

std::span<const ModelShape> NamedShapes() {
  return All();
}

absl::StatusOr<ModelShape> ShapeOfName(std::string_view name) {
  if (name.find('/') != name.npos)
    return absl::NotFoundError(absl::StrCat(
        "no model is called ", config::Quoted(name),
        "; for a model of Hugging Face's hub give its config.json to --config-json, or its files "
        "to --safetensors"));
  std::string words;
  for (const ModelShape& shape : All()) {
    if (shape.name == name) return shape;
    absl::StrAppend(&words, words.empty() ? "" : "|", shape.name);
  }
  const std::string nearest = config::NearestWord(words, name);
  return absl::NotFoundError(absl::StrCat("no model is called ", config::Quoted(name),
                                          nearest.empty() ? "" : "; did you mean ", nearest,
                                          "; --list shows all"));
}

absl::StatusOr<ModelShape> Complete(ModelShape s) {
  EBB_RETURN_IF_ERROR(CheckSizes(s, 0));  // the derived sizes need sizes in range
  if (s.key_value_heads == 0) s.key_value_heads = s.heads;
  if (s.head_width == 0 && s.heads > 0) {
    if (s.width % s.heads != 0)
      return absl::InvalidArgumentError(
          absl::StrCat("width ", s.width, " is not a multiple of ", s.heads, " heads"));
    s.head_width = s.width / s.heads;
  }
  // Llama's rule: two thirds of 4 widths, rounded to a multiple of 256.
  if (s.feed_forward == 0)
    s.feed_forward = s.gated ? (8 * s.width / 3 + 255) / 256 * 256 : 4 * s.width;
  EBB_RETURN_IF_ERROR(CheckSizes(s, 1));
  const auto of = [](int64_t a, int64_t b) {
    return static_cast<double>(a) * static_cast<double>(b);
  };
  const double block = of(s.width, 2 * (s.queries() + s.keys() + s.query_rank + s.key_value_rank)) +
                       of(s.queries() + s.heads * s.value_width, s.query_rank + s.key_value_rank) +
                       3 * of(s.width, s.feed_forward) * static_cast<double>(s.experts) +
                       3 * of(s.width, s.dense_feed_forward + s.shared_feed_forward);
  if (static_cast<double>(s.layers) * block + 2 * of(s.vocabulary, s.width) +
          of(s.context, s.width) >
      0x1p52)
    return absl::InvalidArgumentError(
        "these sizes make more than 2^52 parameters: take smaller ones");
  if (s.heads % s.key_value_heads != 0)
    return absl::InvalidArgumentError(absl::StrCat(s.heads, " heads are not a multiple of ",
                                                   s.key_value_heads, " key-value-heads"));
  if (s.experts_of_token > s.experts)
    return absl::InvalidArgumentError(absl::StrCat("a token goes through ", s.experts_of_token,
                                                   " experts, but a block has ", s.experts));
  if (s.key_value_rank > 0 && s.rotary_width >= s.head_width)
    return absl::InvalidArgumentError(absl::StrCat("the rotary part of a head, ", s.rotary_width,
                                                   ", is not below its width ", s.head_width));
  if (s.key_value_rank > 0 && s.value_width == 0) s.value_width = s.head_width;
  if (s.experts > 1 && !s.gated)
    return absl::InvalidArgumentError("only gated models can have experts: leave --experts out");
  return s;
}

absl::Status CheckTensorRanks(const ModelShape& s, int tensor_ranks) {
  const int64_t heads = s.key_value_rank > 0 ? s.heads : s.key_value_heads;
  if (tensor_ranks <= std::min({heads, s.feed_forward, s.vocabulary})) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--tensor ", tensor_ranks, ": a rank needs a head of keys and values, and the model has ",
      heads, "; give at most ", heads));
}

Model ModelOf(const ModelShape& s, int tensor_ranks) {
  const ModelShape of_rank = OfTensorRank(s, tensor_ranks);
  Model model{.name = s.name,
              .width = s.width,
              .vocabulary = s.vocabulary,
              .context = s.context,
              .experts = s.experts,
              .experts_of_token = s.experts_of_token,
              .tensor_ranks = tensor_ranks};
  model.units.push_back(
      UnitOf("embedding", {{"tokens", {s.vocabulary, s.width}, true, Over::kRows},
                           {"positions", {s.context, s.width}, s.learned_positions},
                           {"norm", {s.width}, s.tied_head},
                           {"norm_bias", {s.width}, s.tied_head && s.norm_biases},
                           {"bias", {s.vocabulary}, s.tied_head && s.head_bias, Over::kRows}}));
  model.visits.push_back({.unit = 0, .tensor_outputs = s.width});
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    model.units.push_back(BlockOf(s, layer));
    model.visits.push_back(VisitOfBlock(of_rank, static_cast<int>(layer) + 1, layer));
  }
  int head = 0;
  if (!s.tied_head) {
    head = static_cast<int>(model.units.size());
    model.units.push_back(UnitOf("head", {{"norm", {s.width}},
                                          {"lm_head", {s.vocabulary, s.width}, true, Over::kRows},
                                          {"norm_bias", {s.width}, s.norm_biases},
                                          {"bias", {s.vocabulary}, s.head_bias, Over::kRows}}));
  }
  // For each row of logits: the largest, the sum of exponentials and the target's.
  constexpr int64_t kNumbers = 3;
  model.visits.push_back(
      {.unit = head,
       .products = static_cast<double>(of_rank.vocabulary) * static_cast<double>(s.width),
       .tensor_inputs = s.width,
       .tensor_numbers = kNumbers});
  return model;
}

}  // namespace ebb::planner
