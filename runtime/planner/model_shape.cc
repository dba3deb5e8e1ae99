#include "ebb/runtime/planner/model_shape.h"

#include <initializer_list>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/nearest.h"

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
    for (const NamedShape& of : kNamed)
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
                         .gated = of.block != kGpt2,
                         .tied_head = of.tied_head,
                         .query_biases = of.block == kQwen2,
                         .query_norms = of.block == kQwen3});
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
     "experts that a token goes through"}};

absl::Status CheckSizes(const ModelShape& shape, int64_t least) {
  for (const ModelSize& size : kSizes) {
    if (shape.*size.of < least || shape.*size.of > size.most)
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
};
ModelUnit UnitOf(std::string name, std::initializer_list<TensorRow> rows) {
  ModelUnit unit{.name = std::move(name)};
  for (const TensorRow& row : rows) {
    if (row.is_there)
      unit.tensors.push_back({.name = absl::StrCat(unit.name, ".", row.name), .shape = row.shape});
  }
  return unit;
}

ModelUnit BlockOf(const ModelShape& s, int64_t layer) {
  const int64_t queries = s.queries(), keys = s.keys();
  const bool has_norm_biases = !s.gated, has_query_biases = !s.gated || s.query_biases,
             has_experts = s.experts > 1, is_dense = !has_experts;
  return UnitOf(absl::StrCat("block", layer),
                {{"norm1", {s.width}},
                 {"norm2", {s.width}},
                 {"norm1_bias", {s.width}, has_norm_biases},
                 {"norm2_bias", {s.width}, has_norm_biases},
                 {"queries", {queries, s.width}},
                 {"keys", {keys, s.width}},
                 {"values", {keys, s.width}},
                 {"projection", {s.width, queries}},
                 {"queries_bias", {queries}, has_query_biases},
                 {"keys_values_bias", {2 * keys}, has_query_biases},
                 {"query_norm", {s.head_width}, s.query_norms},
                 {"key_norm", {s.head_width}, s.query_norms},
                 {"router", {s.experts, s.width}, has_experts},
                 {"gates", {s.experts, s.feed_forward, s.width}, has_experts},
                 {"ups", {s.experts, s.feed_forward, s.width}, has_experts},
                 {"downs", {s.experts, s.width, s.feed_forward}, has_experts},
                 {"gate", {s.feed_forward, s.width}, is_dense && s.gated},
                 {"up", {s.feed_forward, s.width}, is_dense},
                 {"down", {s.width, s.feed_forward}, is_dense},
                 {"projection_bias", {s.width}, is_dense && !s.gated},
                 {"up_bias", {s.feed_forward}, is_dense && !s.gated},
                 {"down_bias", {s.width}, is_dense && !s.gated}});
}

ModelVisit VisitOfBlock(const ModelShape& s, int unit) {
  const int64_t queries = s.queries(), keys = s.keys(),
                hidden = s.experts_of_token * s.feed_forward * (s.gated ? 2 : 1);
  const auto width = static_cast<double>(s.width);
  const double feed_forward = (s.gated ? 3 : 2) * static_cast<double>(s.experts_of_token) *
                              static_cast<double>(s.feed_forward);
  return {.unit = unit,
          .is_block = true,
          .products = width * (static_cast<double>(2 * queries + 2 * keys) + feed_forward +
                               (s.experts > 1 ? static_cast<double>(s.experts) : 0)),
          .products_a_position = 2 * static_cast<double>(queries),
          .kept = 2 * queries + 2 * keys + s.width + hidden,
          // The sum of each row of scores; mean and deviation of two norms.
          .kept_bytes = 4 * (s.heads + 4),
          .kept_a_position = s.heads,
          .scratch = 2 * s.width + 2 * hidden,
          .scratch_a_position = 2 * s.heads};
}

}  // namespace

std::span<const ModelSize> ModelSizes() {
  return kSizes;
}

std::span<const ModelShape> NamedShapes() {
  return All();
}

absl::StatusOr<ModelShape> ShapeOfName(std::string_view name) {
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
  const double block = of(s.width, 2 * (s.queries() + s.keys())) +
                       3 * of(s.width, s.feed_forward) * static_cast<double>(s.experts);
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
  if (s.experts > 1 && !s.gated)
    return absl::InvalidArgumentError("only gated models can have experts: leave --experts out");
  return s;
}

Model ModelOf(const ModelShape& s) {
  Model model{.name = s.name, .width = s.width, .vocabulary = s.vocabulary, .context = s.context};
  model.units.push_back(UnitOf("embedding", {{"tokens", {s.vocabulary, s.width}},
                                             {"positions", {s.context, s.width}, !s.gated},
                                             {"norm", {s.width}, s.tied_head},
                                             {"norm_bias", {s.width}, s.tied_head && !s.gated}}));
  model.visits.push_back({.unit = 0});
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    model.units.push_back(BlockOf(s, layer));
    model.visits.push_back(VisitOfBlock(s, static_cast<int>(layer) + 1));
  }
  int head = 0;
  if (!s.tied_head) {
    head = static_cast<int>(model.units.size());
    model.units.push_back(UnitOf("head", {{"norm", {s.width}},
                                          {"tokens", {s.vocabulary, s.width}},
                                          {"norm_bias", {s.width}, !s.gated}}));
  }
  model.visits.push_back(
      {.unit = head, .products = static_cast<double>(s.vocabulary) * static_cast<double>(s.width)});
  return model;
}

}  // namespace ebb::planner
