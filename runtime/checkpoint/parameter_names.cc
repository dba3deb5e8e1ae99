#include "ebb/runtime/checkpoint/parameter_names.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {
namespace {

// '#' stands for the number of a block.
struct Rule {
  std::string_view outside, own;
  bool transposed = false;
};
constexpr Rule kGpt2[] = {{"wte.weight", "embedding.tokens"},
                          {"wpe.weight", "embedding.positions"},
                          {"h.#.ln_1.weight", "block#.norm1.weight"},
                          {"h.#.ln_1.bias", "block#.norm1.bias"},
                          {"h.#.attn.c_attn.weight", "block#.qkv.weight", true},
                          {"h.#.attn.c_attn.bias", "block#.qkv.bias"},
                          {"h.#.attn.c_proj.weight", "block#.projection.weight", true},
                          {"h.#.attn.c_proj.bias", "block#.projection.bias"},
                          {"h.#.ln_2.weight", "block#.norm2.weight"},
                          {"h.#.ln_2.bias", "block#.norm2.bias"},
                          {"h.#.mlp.c_fc.weight", "block#.up.weight", true},
                          {"h.#.mlp.c_fc.bias", "block#.up.bias"},
                          {"h.#.mlp.c_proj.weight", "block#.down.weight", true},
                          {"h.#.mlp.c_proj.bias", "block#.down.bias"},
                          {"ln_f.weight", "final_norm.weight"},
                          {"ln_f.bias", "final_norm.bias"}};
// Whole models have it before each name, bare models do not.
constexpr std::string_view kGpt2Prefix = "transformer.";
constexpr std::string_view kHead = "lm_head.weight", kTable = "wte.weight";
// Beside the parameters.
constexpr std::string_view kBuffers[] = {"h.#.attn.bias", "h.#.attn.masked_bias",
                                         "model.layers.#.self_attn.rotary_emb.inv_freq",
                                         "model.rotary_emb.inv_freq"};

// The block's digits; empty if the pattern has no '#'. Nothing if the name does not match.
std::optional<std::string_view> Match(std::string_view pattern, std::string_view name) {
  const size_t mark = pattern.find('#');
  if (mark == std::string_view::npos)
    return name == pattern ? std::optional<std::string_view>("") : std::nullopt;
  const std::string_view before = pattern.substr(0, mark), after = pattern.substr(mark + 1);
  if (name.size() <= before.size() + after.size() || !name.starts_with(before) ||
      !name.ends_with(after))
    return std::nullopt;
  const std::string_view digits =
      name.substr(before.size(), name.size() - before.size() - after.size());
  const bool number = digits.size() < 10 &&
                      digits.find_first_not_of("0123456789") == std::string_view::npos &&
                      (digits.size() == 1 || digits.front() != '0');
  return number ? std::optional(digits) : std::nullopt;
}

std::string Filled(std::string_view pattern, std::string_view digits) {
  const size_t mark = pattern.find('#');
  if (mark == std::string_view::npos) return std::string(pattern);
  return absl::StrCat(std::string(pattern.substr(0, mark)), std::string(digits),
                      std::string(pattern.substr(mark + 1)));
}

std::string_view Bare(std::string_view outside) {
  return outside.starts_with(kGpt2Prefix) ? outside.substr(kGpt2Prefix.size()) : outside;
}

bool IsBuffer(std::string_view name) {
  return std::any_of(std::begin(kBuffers), std::end(kBuffers), [&](std::string_view buffer) {
    return Match(buffer, Bare(name)).has_value();
  });
}

std::optional<NameElsewhere> Gpt2Name(std::string_view name, NameDirection direction) {
  return direction == NameDirection::kInside ? Gpt2NameInside(name) : Gpt2NameOutside(name);
}

class RenamedSource : public TensorSource {
 public:
  explicit RenamedSource(std::unique_ptr<TensorSource> source) : source_(std::move(source)) {
    description_ = source_->description();
  }

  // `dtype`: of the numbers; nothing: it stays.
  absl::Status Add(size_t tensor, bool gpt2, NameDirection direction,
                   std::optional<DType> dtype = std::nullopt) {
    TensorInfo info = source_->tensors()[tensor];
    EBB_ASSIGN_OR_RETURN(const NameElsewhere as, NameOf(info, gpt2, direction, description_.path));
    if (const auto [other, is_new] = place_.emplace(std::pair(as.name, info.state), tensor);
        !is_new)
      return absl::InvalidArgumentError(absl::StrCat(
          "'", description_.path, "' has both '", source_->tensors()[other->second].name, "' and '",
          info.name, "', two names of one parameter"));
    info.name = as.name;
    if (dtype && info.dtype != DType::kInt8) info.dtype = *dtype;
    if (as.transposed) std::reverse(info.shape.begin(), info.shape.end());
    tensors_.push_back(std::move(info));
    from_.push_back({.tensor = tensor, .transposed = as.transposed});
    return absl::OkStatus();
  }

  void LeaveOut(const std::string& name) {
    description_.left_out.push_back({.name = name, .why = "no parameter"});
  }

  absl::Status Read(size_t tensor, int64_t begin, std::span<float> values) override {
    const From& from = from_[tensor];
    if (!from.transposed) return source_->Read(from.tensor, begin, values);
    // The interval's rows are columns in the file. Each row of the file has a run of them.
    const int64_t rows = tensors_[tensor].shape[0], columns = tensors_[tensor].shape[1];
    const int64_t end = begin + static_cast<int64_t>(values.size());
    if (begin < 0 || end > rows * columns)
      return absl::InvalidArgumentError(
          absl::StrCat("values beyond the end of ", Described(tensors_[tensor])));
    if (values.empty()) return absl::OkStatus();
    const int64_t first = begin / columns, last = (end - 1) / columns;
    stretch_.resize(static_cast<size_t>(last - first + 1));
    for (int64_t column = 0; column < columns; ++column) {
      EBB_RETURN_IF_ERROR(source_->Read(from.tensor, column * rows + first, stretch_));
      for (int64_t row = first; row <= last; ++row) {
        const int64_t at = row * columns + column;
        if (at >= begin && at < end) values[at - begin] = stretch_[row - first];
      }
    }
    return absl::OkStatus();
  }

  // Whether two tensors of the source have the same bits.
  absl::StatusOr<bool> SameThere(size_t a, size_t b) {
    if (source_->tensors()[a].shape != source_->tensors()[b].shape) return false;
    EBB_ASSIGN_OR_RETURN(const TensorDifference difference, Compare(*source_, a, *source_, b));
    return difference.elements == 0;
  }

 private:
  struct From {
    size_t tensor = 0;
    bool transposed = false;
  };

  const std::unique_ptr<TensorSource> source_;
  std::vector<From> from_;  // by tensor
  // By name and state here: the tensor there.
  std::map<std::pair<std::string, std::string>, size_t> place_;
  std::vector<float> stretch_;
};

}  // namespace

std::optional<NameElsewhere> Gpt2NameOutside(std::string_view own) {
  for (const Rule& rule : kGpt2)
    if (const auto digits = Match(rule.own, own))
      return NameElsewhere{
          .name = absl::StrCat(std::string(kGpt2Prefix), Filled(rule.outside, *digits)),
          .transposed = rule.transposed};
  return std::nullopt;
}

std::optional<NameElsewhere> Gpt2NameInside(std::string_view outside) {
  for (const Rule& rule : kGpt2)
    if (const auto digits = Match(rule.outside, Bare(outside)))
      return NameElsewhere{.name = Filled(rule.own, *digits), .transposed = rule.transposed};
  return std::nullopt;
}

bool AreOfGpt2(std::span<const TensorInfo> tensors, ParameterNames names, NameDirection direction) {
  const auto known = [&](const TensorInfo& tensor) {
    const bool inside = direction == NameDirection::kInside;
    return (inside && (tensor.name == kHead || IsBuffer(tensor.name))) ||
           Gpt2Name(tensor.name, direction).has_value();
  };
  return names == ParameterNames::kGpt2 ||
         (names == ParameterNames::kAuto && std::all_of(tensors.begin(), tensors.end(), known));
}

absl::StatusOr<NameElsewhere> NameOf(const TensorInfo& tensor, bool gpt2, NameDirection direction,
                                     std::string_view owner) {
  if (!gpt2) return NameElsewhere{.name = tensor.name};
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", std::string(owner), "' has '", tensor.name, "'", why));
  };
  const std::optional<NameElsewhere> as = Gpt2Name(tensor.name, direction);
  if (!as) return refuse(", which GPT-2 does not have: leave the names unchanged (same)");
  if (as->transposed && tensor.shape.size() != 2)
    return refuse(
        absl::StrCat(" with the shape ", ShapeText(tensor.shape), ", but GPT-2 has a matrix"));
  return *as;
}

absl::StatusOr<std::unique_ptr<TensorSource>> NamedInside(std::unique_ptr<TensorSource> source,
                                                          ParameterNames names) {
  const std::vector<TensorInfo>& tensors = source->tensors();
  const bool gpt2 = AreOfGpt2(tensors, names, NameDirection::kInside);
  auto renamed = std::make_unique<RenamedSource>(std::move(source));
  std::optional<size_t> head, table;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& tensor = tensors[i];
    if (IsBuffer(tensor.name)) {
      renamed->LeaveOut(tensor.name);
      continue;
    }
    if (gpt2 && tensor.name == kHead && tensor.state.empty()) {
      head = i;
      continue;
    }
    EBB_RETURN_IF_ERROR(renamed->Add(i, gpt2, NameDirection::kInside));
    if (tensor.state.empty() && Bare(tensor.name) == kTable) table = i;
  }
  if (!head) return renamed;
  EBB_ASSIGN_OR_RETURN(const bool tied, table ? renamed->SameThere(*head, *table) : false);
  if (tied) return renamed;
  return absl::InvalidArgumentError(absl::StrCat(
      "'", renamed->description().path, "' has '", std::string(kHead), "' with other values than '",
      std::string(kTable), "': GPT-2 has one table for both"));
}

absl::StatusOr<std::unique_ptr<TensorSource>> NamedOutside(std::unique_ptr<TensorSource> source,
                                                           ParameterNames names, DType dtype) {
  const std::vector<TensorInfo>& tensors = source->tensors();
  std::vector<TensorInfo> values;
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(values),
               [](const TensorInfo& tensor) { return tensor.state.empty(); });
  const bool gpt2 = AreOfGpt2(values, names, NameDirection::kOutside);
  auto renamed = std::make_unique<RenamedSource>(std::move(source));
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].state.empty())
      EBB_RETURN_IF_ERROR(renamed->Add(i, gpt2, NameDirection::kOutside, dtype));
  return renamed;
}

}  // namespace ebb
