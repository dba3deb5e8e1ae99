#include "ebb/runtime/planner/model_shape.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/nearest.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::planner {
namespace {

// GPT-2's and GPT-3's shapes; then gated models: Llama 2 and 3, Mistral, Mixtral, Qwen 2.5 and Qwen
// 3.
ModelShape Gpt2(std::string name, int64_t layers, int64_t width, int64_t heads,
                int64_t context = 1024) {
  return {.name = std::move(name),
          .layers = layers,
          .width = width,
          .heads = heads,
          .key_value_heads = heads,
          .head_width = width / heads,
          .feed_forward = 4 * width,
          .vocabulary = 50257,
          .context = context,
          .gated = false,
          .tied_head = true};
}
struct Heads {
  int64_t queries = 0, keys = 0;
};
ModelShape Gated(std::string name, int64_t layers, int64_t width, Heads heads, int64_t feed_forward,
                 int64_t vocabulary, int64_t context) {
  return {.name = std::move(name),
          .layers = layers,
          .width = width,
          .heads = heads.queries,
          .key_value_heads = heads.keys,
          .head_width = width / heads.queries,
          .feed_forward = feed_forward,
          .vocabulary = vocabulary,
          .context = context};
}
ModelShape Experts(ModelShape shape, int64_t experts, int64_t of_token) {
  shape.experts = experts;
  shape.experts_of_token = of_token;
  return shape;
}
ModelShape Qwen2(std::string name, int64_t layers, int64_t width, Heads heads, int64_t feed_forward,
                 bool small) {
  ModelShape shape =
      Gated(std::move(name), layers, width, heads, feed_forward, small ? 151936 : 152064, 32768);
  shape.query_biases = true;
  shape.tied_head = small;
  return shape;
}
ModelShape Qwen3(std::string name, int64_t layers, int64_t width, Heads heads, int64_t feed_forward,
                 bool tied) {
  ModelShape shape = Gated(std::move(name), layers, width, heads, feed_forward, 151936, 40960);
  shape.head_width = 128;
  shape.query_norms = true;
  shape.tied_head = tied;
  return shape;
}

const std::vector<ModelShape>& All() {
  static const auto* const all = new std::vector<ModelShape>{
      Gpt2("gpt2", 12, 768, 12),
      Gpt2("gpt2-medium", 24, 1024, 16),
      Gpt2("gpt2-large", 36, 1280, 20),
      Gpt2("gpt2-xl", 48, 1600, 25),
      Gpt2("gpt3-175b", 96, 12288, 96, 2048),
      Gated("llama-2-7b", 32, 4096, {32, 32}, 11008, 32000, 4096),
      Gated("llama-2-13b", 40, 5120, {40, 40}, 13824, 32000, 4096),
      Gated("llama-2-70b", 80, 8192, {64, 8}, 28672, 32000, 4096),
      Gated("llama-3-8b", 32, 4096, {32, 8}, 14336, 128256, 8192),
      Gated("llama-3-70b", 80, 8192, {64, 8}, 28672, 128256, 8192),
      Gated("llama-3-405b", 126, 16384, {128, 8}, 53248, 128256, 131072),
      Gated("mistral-7b", 32, 4096, {32, 8}, 14336, 32000, 32768),
      Experts(Gated("mixtral-8x7b", 32, 4096, {32, 8}, 14336, 32000, 32768), 8, 2),
      Experts(Gated("mixtral-8x22b", 56, 6144, {48, 8}, 16384, 32768, 65536), 8, 2),
      Qwen2("qwen2.5-0.5b", 24, 896, {14, 2}, 4864, true),
      Qwen2("qwen2.5-1.5b", 28, 1536, {12, 2}, 8960, true),
      Qwen2("qwen2.5-3b", 36, 2048, {16, 2}, 11008, true),
      Qwen2("qwen2.5-7b", 28, 3584, {28, 4}, 18944, false),
      Qwen2("qwen2.5-14b", 48, 5120, {40, 8}, 13824, false),
      Qwen2("qwen2.5-32b", 64, 5120, {40, 8}, 27648, false),
      Qwen2("qwen2.5-72b", 80, 8192, {64, 8}, 29568, false),
      Qwen3("qwen3-0.6b", 28, 1024, {16, 8}, 3072, true),
      Qwen3("qwen3-1.7b", 28, 2048, {16, 8}, 6144, true),
      Qwen3("qwen3-4b", 36, 2560, {32, 8}, 9728, true),
      Qwen3("qwen3-8b", 36, 4096, {32, 8}, 12288, false),
      Qwen3("qwen3-14b", 40, 5120, {40, 8}, 17408, false),
      Qwen3("qwen3-32b", 64, 5120, {64, 8}, 25600, false),
      Experts(Qwen3("qwen3-30b-a3b", 48, 2048, {32, 4}, 768, false), 128, 8),
      Experts(Qwen3("qwen3-235b-a22b", 94, 4096, {64, 4}, 1536, false), 128, 8),
  };
  return *all;
}

struct SizeLimit {
  const char* name;
  int64_t ModelShape::*of;
  int64_t most;
};
// The product of any two sizes is at most 2^53.
constexpr SizeLimit kSizeLimits[] = {{"layers", &ModelShape::layers, kUnitsMax - 2},
                                     {"width", &ModelShape::width, 1 << 22},
                                     {"heads", &ModelShape::heads, 1 << 16},
                                     {"key-value-heads", &ModelShape::key_value_heads, 1 << 16},
                                     {"head-width", &ModelShape::head_width, 1 << 16},
                                     {"feed-forward", &ModelShape::feed_forward, 1 << 24},
                                     {"vocabulary", &ModelShape::vocabulary, 1 << 24},
                                     {"context", &ModelShape::context, 1 << 28},
                                     {"experts", &ModelShape::experts, 1 << 14},
                                     {"experts-of-token", &ModelShape::experts_of_token, 1 << 14}};

absl::Status CheckSizes(const ModelShape& shape, int64_t least) {
  for (const SizeLimit& size : kSizeLimits) {
    if (shape.*size.of < least || shape.*size.of > size.most)
      return absl::InvalidArgumentError(
          absl::StrCat(size.name, " is ", shape.*size.of == 0 ? "missing, or " : "", shape.*size.of,
                       ": it must be from 1 to ", size.most));
  }
  return absl::OkStatus();
}

class UnitMaker {
 public:
  UnitMaker(std::string name, std::string prefix) : prefix_(std::move(prefix)) {
    unit_.name = std::move(name);
  }
  UnitMaker& Add(std::string_view name, std::vector<int64_t> shape) {
    std::string whole = prefix_;
    whole += name;
    unit_.tensors.push_back({.name = std::move(whole), .shape = std::move(shape)});
    return *this;
  }
  ModelUnit Take() { return std::move(unit_); }

 private:
  ModelUnit unit_;
  const std::string prefix_;
};

ModelUnit BlockOf(const ModelShape& s, int64_t layer) {
  const std::string name = absl::StrCat("block", layer);
  UnitMaker made(name, name + ".");
  const int64_t queries = s.queries(), keys = s.keys();
  const bool has_query_biases = !s.gated || s.query_biases;
  made.Add("norm1", {s.width}).Add("norm2", {s.width});
  if (!s.gated) made.Add("norm1_bias", {s.width}).Add("norm2_bias", {s.width});
  made.Add("queries", {queries, s.width})
      .Add("keys", {keys, s.width})
      .Add("values", {keys, s.width})
      .Add("projection", {s.width, queries});
  if (has_query_biases) made.Add("queries_bias", {queries}).Add("keys_values_bias", {2 * keys});
  if (s.query_norms) made.Add("query_norm", {s.head_width}).Add("key_norm", {s.head_width});
  if (s.experts > 1) {
    made.Add("router", {s.experts, s.width})
        .Add("gates", {s.experts, s.feed_forward, s.width})
        .Add("ups", {s.experts, s.feed_forward, s.width})
        .Add("downs", {s.experts, s.width, s.feed_forward});
    return made.Take();
  }
  if (s.gated) made.Add("gate", {s.feed_forward, s.width});
  made.Add("up", {s.feed_forward, s.width}).Add("down", {s.width, s.feed_forward});
  if (!s.gated)
    made.Add("projection_bias", {s.width})
        .Add("up_bias", {s.feed_forward})
        .Add("down_bias", {s.width});
  return made.Take();
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
  UnitMaker embedding("embedding", "embedding.");
  embedding.Add("tokens", {s.vocabulary, s.width});
  if (!s.gated) embedding.Add("positions", {s.context, s.width});
  if (s.tied_head) embedding.Add("norm", {s.width});
  if (s.tied_head && !s.gated) embedding.Add("norm_bias", {s.width});
  model.units.push_back(embedding.Take());
  model.visits.push_back({.unit = 0});
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    model.units.push_back(BlockOf(s, layer));
    model.visits.push_back(VisitOfBlock(s, static_cast<int>(layer) + 1));
  }
  int head = 0;
  if (!s.tied_head) {
    head = static_cast<int>(model.units.size());
    UnitMaker made("head", "head.");
    made.Add("norm", {s.width}).Add("tokens", {s.vocabulary, s.width});
    if (!s.gated) made.Add("norm_bias", {s.width});
    model.units.push_back(made.Take());
  }
  model.visits.push_back(
      {.unit = head, .products = static_cast<double>(s.vocabulary) * static_cast<double>(s.width)});
  return model;
}

}  // namespace ebb::planner
