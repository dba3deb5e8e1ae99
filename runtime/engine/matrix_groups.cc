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
  return parameter.shape.size() == 2 && IsOfHiddenLayer(parameter.name);
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
  const int64_t parts = group == nullptr ? 1 : group->muon_matrices;
  if (parameter.matrix_rows.empty() && parts > 1) {
    if (rows % parts != 0) {
      return refuse("has ", rows, " rows, which are not ", parts,
                    " matrices (\"muon_matrices\" of its group)");
    }
    parameter.matrix_rows.assign(static_cast<size_t>(parts), rows / parts);
  }
  const std::vector<int64_t>& of = parameter.matrix_rows;
  const bool positive = std::all_of(of.begin(), of.end(), [](int64_t n) { return n > 0; });
  if (!of.empty() && (!positive || std::accumulate(of.begin(), of.end(), int64_t{0}) != rows)) {
    return refuse("has ", rows, " rows, and ParameterSpec::matrix_rows are ",
                  absl::StrJoin(of, ", "));
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
  beside.muon_matrices = 1;
  config.ebb.parameter_groups[GroupBeside(group)] = std::move(beside);
}

// Counts what Muon updates, and names matrices that it does not.
class Summary {
 public:
  void Add(const ParameterSpec& parameter, bool is_muons) {
    (is_muons ? muons_ : others_).Add(parameter);
    if (!is_muons && parameter.shape.size() >= 2) left_.push_back(parameter.name);
  }
  std::string Text() const {
    constexpr size_t kNamed = 4;
    std::string text = absl::StrCat("Muon updates ", muons_.Text(), ", and AdamW ", others_.Text());
    if (left_.empty()) return text;
    const size_t named = std::min(left_.size(), kNamed);
    absl::StrAppend(
        &text, ", among them ",
        absl::StrJoin(left_.begin(), left_.begin() + static_cast<int64_t>(named), ", "));
    if (left_.size() > named)
      absl::StrAppend(&text, " and ", left_.size() - named, " more matrices");
    return absl::StrCat(text, "; \"use_muon\" of a parameter group decides otherwise");
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
  std::vector<std::string> left_;
};

}  // namespace

std::string GroupBeside(std::string_view group) {
  return absl::StrCat(std::string(group),
                      group.empty() ? kBeside.substr(1).data() : kBeside.data());
}

bool IsOfHiddenLayer(std::string_view name) {
  const std::string lower = absl::AsciiStrToLower(absl::string_view(name.data(), name.size()));
  std::vector<std::string> parts = absl::StrSplit(lower, '.');
  for (const std::string& part : parts)
    if (part.find("embed") != part.npos) return false;
  if (parts.back() == "weight" && parts.size() > 1) parts.pop_back();
  constexpr std::string_view kOutside[] = {"wte",       "wpe",  "shared", "relative_attention_bias",
                                           "lm_head",   "head", "output", "score",
                                           "classifier"};
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
    is_new = is_new || (of_muon && (!is_muons || parameter.matrix_update == MatrixUpdate::kByRule));
    if (is_muons) {
      EBB_RETURN_IF_ERROR(TakeRows(config, parameter));
    } else if (of_muon) {
      AddBeside(parameter.group, config);
      parameter.group = GroupBeside(parameter.group);
    }
    parameter.matrix_update = is_muons ? MatrixUpdate::kYes : MatrixUpdate::kNo;
    summary.Add(parameter, is_muons);
  }
  if (is_new) config.remarks.push_back(summary.Text());
  return model;
}

}  // namespace ebb
