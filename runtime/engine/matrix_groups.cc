#include "ebb/runtime/engine/matrix_groups.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {
namespace {

constexpr std::string_view kBeside = " [AdamW]";

const ParameterGroupConfig* GroupOf(const Config& config, const std::string& name) {
  const auto found = config.ebb.parameter_groups.find(name);
  return found == config.ebb.parameter_groups.end() ? nullptr : &found->second;
}

const OptimizerConfig& OptimizerOfGroup(const Config& config, const std::string& name) {
  const ParameterGroupConfig* const group = GroupOf(config, name);
  return group != nullptr && group->optimizer ? *group->optimizer : config.optimizer;
}

// The group beside which this one was made; none: it was not.
std::optional<std::string> BaseOf(const std::string& group) {
  if (group == kBeside.substr(1)) return "";
  if (!std::string_view(group).ends_with(kBeside)) return std::nullopt;
  return group.substr(0, group.size() - kBeside.size());
}

bool IsMuons(const Config& config, const ParameterSpec& parameter) {
  if (!parameter.trainable || parameter.matrix_update == MatrixUpdate::kNo) return false;
  if (parameter.matrix_update == MatrixUpdate::kYes) return true;
  const ParameterGroupConfig* const group = GroupOf(config, parameter.group);
  if (group != nullptr && group->use_muon) return *group->use_muon;
  return parameter.matrix_update == MatrixUpdate::kByRule && parameter.shape.size() == 2 &&
         IsOfHiddenLayer(parameter.name);
}

// The rows of its matrices, which are checked.
absl::Status TakeRows(const Config& config, ParameterSpec& parameter) {
  const auto refuse = [&](const auto&... why) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter '", parameter.name, "' is to be updated by Muon, but ", why...));
  };
  const size_t dimensions = parameter.shape.size();
  if (dimensions < 2 || dimensions > 3) {
    return refuse("has ", dimensions, dimensions == 1 ? " dimension" : " dimensions",
                  ": a matrix has two, a stack of matrices three; give it another optimizer");
  }
  const int64_t rows = parameter.shape[dimensions - 2];
  const ParameterGroupConfig* const group = GroupOf(config, parameter.group);
  if (group != nullptr && parameter.matrix_rows.empty() && group->muon_matrices.size() > 1) {
    const std::vector<int64_t>& ratio = group->muon_matrices;
    const int64_t sum = std::accumulate(ratio.begin(), ratio.end(), int64_t{0});
    if (rows % sum != 0) {
      return refuse("has ", rows, " rows, which \"muon_matrices\" of its group cannot divide into ",
                    ratio.size(), " matrices: ", rows, " is not a multiple of ", sum);
    }
    for (const int64_t part : ratio) parameter.matrix_rows.push_back(rows / sum * part);
  }
  const std::vector<int64_t>& of = parameter.matrix_rows;
  const bool positive = std::all_of(of.begin(), of.end(), [](int64_t n) { return n > 0; });
  if (!of.empty() && (!positive || std::accumulate(of.begin(), of.end(), int64_t{0}) != rows)) {
    return refuse("has ", rows, " rows, and ParameterSpec::matrix_rows are ",
                  absl::StrJoin(of, ", "));
  }
  return absl::OkStatus();
}

// A group whose matrices are to be divided has some. (A group without parameters is Setup's error.)
absl::Status CheckDivided(const ModelSpec& model, const Config& config) {
  for (const auto& [name, group] : config.ebb.parameter_groups) {
    const auto has = [&](const std::string& of_name) {
      return std::any_of(model.parameters.begin(), model.parameters.end(),
                         [&](const ParameterSpec& one) { return one.group == of_name; });
    };
    if (group.muon_matrices.size() == 1 || has(name) || !has(GroupBeside(name))) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("\"ebb.parameter_groups.", name,
                     ".muon_matrices\" is given, but Muon updates "
                     "no parameter of the group; add \"use_muon\": true, or leave it out"));
  }
  return absl::OkStatus();
}

// Adds the group of those parameters that AdamW updates.
void AddBeside(const std::string& group, Config& config) {
  if (config.ebb.parameter_groups.contains(GroupBeside(group))) return;
  ParameterGroupConfig beside;
  if (const ParameterGroupConfig* const own = GroupOf(config, group)) beside = *own;
  const OptimizerConfig& muon = OptimizerOfGroup(config, group);
  OptimizerConfig adam{.type = OptimizerType::kAdamW,
                       .learning_rate = muon.learning_rate,
                       .beta1 = muon.beta1,
                       .beta2 = muon.beta2,
                       .epsilon = muon.epsilon,
                       .weight_decay = beside.weight_decay.value_or(muon.weight_decay),
                       .states = muon.states,
                       .min_8bit_size = muon.min_8bit_size};
  // A factor, so that a schedule and the step's rate reach both.
  if (muon.adam_learning_rate && muon.learning_rate > 0) {
    beside.lr_factor *= *muon.adam_learning_rate / muon.learning_rate;
  } else if (muon.adam_learning_rate) {
    adam.learning_rate = *muon.adam_learning_rate;
  }
  beside.optimizer = adam;
  beside.weight_decay.reset();
  beside.use_muon.reset();
  beside.muon_matrices = {1};
  config.ebb.parameter_groups[GroupBeside(group)] = std::move(beside);
}

// Whether models with such a name keep several matrices in it: q, k and v, or gate and up.
bool IsFused(std::string_view name) {
  constexpr std::string_view kFused[] = {"qkv", "query_key_value", "in_proj", "gate_up"};
  const std::string lower = absl::AsciiStrToLower(absl::string_view(name.data(), name.size()));
  return std::any_of(std::begin(kFused), std::end(kFused),
                     [&](std::string_view word) { return lower.find(word) != lower.npos; });
}

// "layers.0.up": models name in this way what they have many of, so hidden layers.
bool IsOfNumberedLayer(const std::string& name) {
  const std::vector<std::string> parts = absl::StrSplit(name, '.');
  return std::any_of(parts.begin(), parts.end(), [](const std::string& part) {
    return !part.empty() && std::all_of(part.begin(), part.end(), absl::ascii_isdigit);
  });
}

// The first of them, and how many more there are.
std::string Named(const std::vector<std::string>& names, size_t most) {
  const size_t named = std::min(names.size(), most);
  std::string text =
      absl::StrJoin(names.begin(), names.begin() + static_cast<int64_t>(named), ", ");
  if (names.size() > named) absl::StrAppend(&text, " and ", names.size() - named, " more matrices");
  return text;
}

// Counts what Muon updates, and names matrices that it does not, or that may be several.
class Summary {
 public:
  void Add(const ParameterSpec& parameter, bool is_muons) {
    (is_muons ? muons_ : others_).Add(parameter);
    if (!is_muons && parameter.shape.size() >= 2) left_.push_back(parameter.name);
    if (is_muons && parameter.matrix_rows.empty() && IsFused(parameter.name))
      fused_.push_back(parameter.name);
    if (is_muons && !IsOfNumberedLayer(parameter.name)) outside_.push_back(parameter.name);
  }
  std::string Text() const {
    std::string text = absl::StrCat("Muon updates ", muons_.Text());
    if (!outside_.empty())
      absl::StrAppend(&text, ", among them ", Named(outside_, 4), " of no numbered layer");
    absl::StrAppend(&text, ", and AdamW ", others_.Text());
    if (!left_.empty()) absl::StrAppend(&text, ", among them ", Named(left_, 4));
    if (!left_.empty() || !outside_.empty())
      text += "; \"use_muon\" of a parameter group decides otherwise";
    if (!fused_.empty()) {
      const bool one = fused_.size() == 1;
      absl::StrAppend(&text, "; ", Named(fused_, 1), one ? " is" : " are", " taken for one matrix",
                      one ? "" : " each", ": \"muon_matrices\" of a parameter group divides ",
                      one ? "it" : "them");
    }
    return text;
  }

 private:
  struct Count {
    int64_t parameters = 0, elements = 0;
    void Add(const ParameterSpec& parameter) {
      ++parameters;
      elements += Elements(parameter.shape);
    }
    std::string Text() const {
      return absl::StrCat(parameters, parameters == 1 ? " parameter" : " parameters", " of ",
                          elements, elements == 1 ? " element" : " elements");
    }
  };
  Count muons_, others_;
  std::vector<std::string> left_, fused_, outside_;
};

}  // namespace

std::string GroupBeside(std::string_view group) {
  return absl::StrCat(std::string(group),
                      group.empty() ? kBeside.substr(1).data() : kBeside.data());
}

bool IsBesideMuon(std::string_view group) {
  return BaseOf(std::string(group)).has_value();
}

bool IsOfHiddenLayer(std::string_view name) {
  const std::string lower = absl::AsciiStrToLower(absl::string_view(name.data(), name.size()));
  std::vector<std::string> parts = absl::StrSplit(lower, '.');
  for (const std::string& part : parts)
    if (part.find("embed") != part.npos || part == "emb" || part.starts_with("emb_") ||
        part.ends_with("_emb"))
      return false;
  if (parts.back() == "weight" && parts.size() > 1) parts.pop_back();
  constexpr std::string_view kOutside[] = {
      "wte", "wpe", "shared", "relative_attention_bias", "output", "score", "classifier"};
  if (parts.back() == "head" || parts.back().ends_with("_head")) return false;
  return std::find(std::begin(kOutside), std::end(kOutside), parts.back()) == std::end(kOutside);
}

absl::StatusOr<ModelSpec> WithMatrixGroups(ModelSpec model, Config& config,
                                           bool has_own_optimizer) {
  const auto is_muon = [](const OptimizerConfig& of) { return of.type == OptimizerType::kMuon; };
  const auto& groups = config.ebb.parameter_groups;
  const bool any = is_muon(config.optimizer) ||
                   std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
                     return group.second.optimizer && is_muon(*group.second.optimizer);
                   });
  if (!any || has_own_optimizer) {
    for (ParameterSpec& parameter : model.parameters) parameter.matrix_update = MatrixUpdate::kNo;
    return model;
  }
  Summary summary;
  bool is_new = false;
  for (ParameterSpec& parameter : model.parameters) {
    if (!parameter.trainable) continue;
    if (const std::optional<std::string> base = BaseOf(parameter.group)) {
      // A model that an engine has shown, with the configuration that the engine was given.
      if (is_muon(OptimizerOfGroup(config, *base))) AddBeside(*base, config);
      parameter.matrix_update = MatrixUpdate::kNo;
      continue;
    }
    const bool of_muon = is_muon(OptimizerOfGroup(config, parameter.group)),
               is_muons = of_muon && IsMuons(config, parameter);
    is_new = is_new || (of_muon && (!is_muons || parameter.matrix_update != MatrixUpdate::kYes));
    if (is_muons) {
      EBB_RETURN_IF_ERROR(TakeRows(config, parameter));
    } else if (of_muon) {
      AddBeside(parameter.group, config);
      parameter.group = GroupBeside(parameter.group);
    }
    parameter.matrix_update = is_muons ? MatrixUpdate::kYes : MatrixUpdate::kNo;
    summary.Add(parameter, is_muons);
  }
  EBB_RETURN_IF_ERROR(CheckDivided(model, config));
  if (is_new) config.remarks.push_back(summary.Text());
  return model;
}

}  // namespace ebb
