#include "ebb/runtime/planner/program/tensor_arguments.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb::planner {
namespace {

// "4": one width; "auto": those of kWidths that a model and a machine can have; "": the file's.
constexpr int kWidths[] = {1, 2, 4, 8}, kWidthMax = 1024;
absl::StatusOr<std::vector<int>> WidthsOf(const std::string& given, const Config& config) {
  if (given.empty()) return std::vector<int>{static_cast<int>(config.ebb.mesh.tensor)};
  if (given == "auto") return std::vector<int>(std::begin(kWidths), std::end(kWidths));
  int width = 0;
  if (!absl::SimpleAtoi(given, &width) || width < 1 || width > kWidthMax)
    return absl::InvalidArgumentError(
        absl::StrCat("--tensor is ", config::Quoted(given),
                     ": it must be auto, or a number of ranks from 1 to ", kWidthMax));
  return std::vector<int>{width};
}

}  // namespace

absl::Status AddWidths(const TensorArguments& given, const ModelArguments& of_model,
                       const Asked& asked_for, Question& question) {
  EBB_ASSIGN_OR_RETURN(const std::vector<int> asked, WidthsOf(given.width, question.config));
  const bool is_auto = asked.size() > 1, has_shape = of_model.safetensors.empty();
  if (asked != std::vector<int>{1} && !has_shape) {  // all widths are planned in one way
    EBB_ASSIGN_OR_RETURN(question.model, ModelOfConfigBeside(of_model, /*tensor_ranks=*/1));
    if (!asked_for.has_file)
      question.config = WithGathers(question.model, std::move(question.config));
  }
  question.widths.clear();
  for (const int width : asked) {
    if (width == 1) {
      question.widths.push_back(width);
      continue;
    }
    absl::StatusOr<Model> model = ModelOf(of_model, width);
    if (!model.ok() && !is_auto) return model.status();
    if (!model.ok()) break;
    question.over_tensor.emplace(width, *std::move(model));
    question.widths.push_back(width);
  }
  if (asked_for.with_all && has_shape && asked == std::vector<int>{1}) {
    for (const int width : kWidths) {
      if (absl::StatusOr<Model> model = ModelOf(of_model, width); width > 1 && model.ok())
        question.over_tensor.emplace(width, *std::move(model));
    }
  }
  const int first = question.widths.front();
  if (!is_auto && !asked_for.is_compared && question.ranks % first != 0)
    return absl::InvalidArgumentError(
        absl::StrCat("--tensor ", first, " does not divide ", question.ranks, " ranks: every ",
                     first, " ranks share each layer, so use a multiple of ", first, " ranks"));
  if (is_auto && !asked_for.is_compared) {
    question.widths = question.possible_widths();
  }
  if (given.sequence_parallel && question.widths.back() == 1)
    return absl::InvalidArgumentError(
        "--sequence-parallel shares rows over tensor ranks: it needs --tensor of at least 2");
  question.config.ebb.mesh.tensor = is_auto ? 1 : first;
  question.sizes_gathers = !asked_for.has_file;
  if (question.sizes_gathers && first > 1)
    question.config = WithGathers(*question.model_over(first), std::move(question.config));
  return absl::OkStatus();
}

absl::Status CheckRows(const TensorArguments& given, const Question& question) {
  const int most = question.widths.back();
  if (!given.sequence_parallel || question.pass.context % most == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--sequence-parallel divides the rows of a sequence over ", most,
      " tensor ranks, and --context is ", question.pass.context, ": use a multiple of ", most));
}

int PartsOf(const Question& question, double sequences) {
  for (const int width : question.widths) {
    if (question.data_ranks(width) <= sequences) return question.data_ranks(width);
  }
  return question.data_ranks(question.widths.back());
}

absl::Status GiveOneBatch(int64_t whole, Question& question) {
  const auto at_least_one = [](int64_t number) { return std::max<int64_t>(1, number); };
  question.sequences = whole > 0 ? whole
                                 : at_least_one(question.config.micro_batch_size) *
                                       at_least_one(question.config.gradient_accumulation_steps) *
                                       question.ranks;
  if (!question.possible_widths().empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a batch of ", whole, " sequences is less than one for each of ",
                   question.data_ranks(question.widths.back()), " data ranks"));
}

void AddTensorOptions(CLI::App& app, TensorArguments& arguments) {
  app.add_option("--tensor", arguments.width,
                 "ranks that share each layer; auto: the fastest of 1, 2, 4 and 8")
      ->option_text("N|auto");
  app.add_flag("--sequence-parallel", arguments.sequence_parallel,
               "tensor ranks also share the rows of norms and between blocks");
}

}  // namespace ebb::planner
