#include "ebb/runtime/planner/adapters.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/nearest.h"

namespace ebb::planner {
namespace {

constexpr char kAllLinear[] = "all-linear";

// The names in files, beside ours. GPT-2's c_proj and Phi's dense are two matrices or one.
struct Alias {
  const char *name, *module;
};
constexpr Alias kAliases[] = {{"c_attn", "qkv_proj"},
                              {"query_key_value", "qkv_proj"},
                              {"c_proj", "o_proj"},
                              {"c_proj", "down_proj"},
                              {"dense", "o_proj"},
                              {"out_proj", "o_proj"},
                              {"c_fc", "up_proj"},
                              {"fc1", "up_proj"},
                              {"dense_h_to_4h", "up_proj"},
                              {"fc2", "down_proj"},
                              {"dense_4h_to_h", "down_proj"},
                              {"w1", "gate_proj"},
                              {"w3", "up_proj"},
                              {"w2", "down_proj"}};

// The sides of a matrix: one of each expert, or one of all tokens.
struct Sides {
  int64_t experts = 1, rows = 0, columns = 0;
};
Sides SidesOf(const ModelTensor& tensor) {
  const auto& shape = tensor.shape;
  if (shape.size() == 3) return {shape[0], shape[1], shape[2]};
  return {1, shape[0], shape[1]};
}

// How tensor ranks share the adapters of a matrix. Of a matrix that is cut by rows B is, and each rank
// has a term of A's gradient. Of one that is cut by columns it is the other way round.
void Share(std::span<const ModelTensor> joined, ModelTensor& a, ModelTensor& b) {
  const std::optional<Split>& first = joined.front().split;
  if (!first) return;
  const bool by_columns = first->dimension + 1 == std::ssize(joined.front().shape);
  ModelTensor& cut = by_columns ? a : b;
  cut.split = first;
  (by_columns ? b : a).sums_gradient = true;
  if (joined.size() == 1) return;
  for (const ModelTensor& each : joined) {
    cut.split->parts.push_back(each.shape[first->dimension]);
    cut.split->multiple = std::min(cut.split->multiple, each.split->multiple);
  }
}

// The modules to adapt, by our names; an error for a word that names none of the model's.
absl::StatusOr<std::set<std::string>> ModulesOf(const Model& model, const Adapters& adapters) {
  std::set<std::string> has, chosen;
  for (const ModelUnit& unit : model.units) {
    for (const ModelTensor& tensor : unit.tensors) {
      if (!tensor.module.empty()) has.insert(tensor.module);
    }
  }
  for (const std::string& word : adapters.modules) {
    std::set<std::string> meant;
    if (word == kAllLinear) meant = has;
    if (has.contains(word)) meant.insert(word);
    for (const Alias& alias : kAliases) {
      if (word == alias.name && has.contains(alias.module)) meant.insert(alias.module);
    }
    if (meant.empty()) {
      const std::string all = absl::StrJoin(has, "|"),
                        nearest = config::NearestWord(all + "|" + kAllLinear, word);
      return absl::InvalidArgumentError(
          absl::StrCat("--lora-modules: the model has no module ", config::Quoted(word),
                       nearest.empty() ? "" : "; did you mean ", nearest, "; it has ",
                       absl::StrJoin(has, ", "), "; ", kAllLinear, " is all of them"));
    }
    chosen.insert(meant.begin(), meant.end());
  }
  return chosen;
}

}  // namespace

absl::StatusOr<Model> WithAdapters(Model model, const Adapters& adapters) {
  const absl::StatusOr<std::set<std::string>> chosen = ModulesOf(model, adapters);
  if (!chosen.ok()) return chosen.status();
  const auto used = [&](const Sides& of) {
    return of.experts > 1 ? static_cast<double>(model.experts_of_token) : 1.0;
  };
  for (ModelUnit& unit : model.units) {
    for (ModelTensor& tensor : unit.tensors) tensor.trainable = false;
  }
  for (ModelVisit& visit : model.visits) {
    visit.frozen_products = visit.products;
    if (!visit.is_block) continue;
    ModelUnit& unit = model.units[visit.unit];
    std::vector<ModelTensor> added;
    for (size_t i = 0; i < unit.tensors.size();) {
      const ModelTensor& tensor = unit.tensors[i];
      Sides sides = tensor.module.empty() ? Sides() : SidesOf(tensor);
      const size_t begin = i;
      size_t end = i + 1;
      for (; end < unit.tensors.size() && unit.tensors[end].joins_previous; ++end)
        sides.rows += SidesOf(unit.tensors[end]).rows;
      i = end;
      if (tensor.module.empty() || !chosen->contains(tensor.module)) continue;
      const auto shape = [&](int64_t rows, int64_t columns) {
        std::vector<int64_t> of = {rows, columns};
        if (sides.experts > 1) of.insert(of.begin(), sides.experts);
        return of;
      };
      added.push_back(
          {.name = tensor.name + ".lora_A", .shape = shape(adapters.rank, sides.columns)});
      added.push_back({.name = tensor.name + ".lora_B", .shape = shape(sides.rows, adapters.rank)});
      ModelTensor &a = *(added.end() - 2), &b = added.back();
      Share({&unit.tensors[begin], end - begin}, a, b);
      const auto of_rank = [&](int64_t side, const ModelTensor& adapter) {
        const int ranks = adapter.split ? model.tensor_ranks : 1;
        return static_cast<double>((side + ranks - 1) / ranks);
      };
      const double rank = static_cast<double>(adapters.rank) * used(sides);
      visit.products += rank * (of_rank(sides.rows, b) + of_rank(sides.columns, a));
      visit.kept += static_cast<int64_t>(rank);
      visit.torch_kept += static_cast<int64_t>(rank);
    }
    std::move(added.begin(), added.end(), std::back_inserter(unit.tensors));
  }
  model.trains =
      absl::StrCat("LoRA of rank ", adapters.rank, " on ", absl::StrJoin(adapters.modules, ", "));
  return model;
}

Model WithQuantizedBase(Model model) {
  constexpr int64_t kBlock = 64, kFactorBytes = 4;
  for (ModelVisit& visit : model.visits) {
    if (!visit.is_block) continue;
    for (ModelTensor& tensor : model.units[visit.unit].tensors) {
      if (tensor.module.empty()) continue;
      const Sides sides = SidesOf(tensor);
      const int64_t elements = sides.rows * sides.columns, all = Elements(tensor.shape);
      visit.dequantized += all;
      visit.dequantized_most = std::max(visit.dequantized_most, elements);
      tensor.parameters = all;
      tensor.stored = DType::kInt8;
      tensor.shape = {(all + 1) / 2 + kFactorBytes * ((all + kBlock - 1) / kBlock)};
    }
  }
  absl::StrAppend(&model.trains, ", a base of 4 bits");
  return model;
}

}  // namespace ebb::planner
