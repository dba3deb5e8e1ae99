#include "ebb/runtime/planner/answer_title.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/keys.h"
#include "ebb/runtime/planner/small_states.h"
#include "ebb/sharding/fit/budget.h"

namespace ebb::planner {
namespace {

// "2.01 GB of BF16, 0.1 GB of F32".
std::string StoredText(const Model& model) {
  std::string text;
  for (const auto& [dtype, bytes] : model.stored_bytes)
    absl::StrAppendFormat(&text, "%s%.4g GB of %s", text.empty() ? "" : ", ",
                          static_cast<double>(bytes) / 1e9, dtype);
  return text.empty() ? "" : absl::StrCat("its files hold ", text, "\n");
}

// "a step of a rank: 1 x 4 sequences of 4096 tokens", or of all ranks.
std::string BatchText(const Question& question) {
  const int64_t context = question.pass.context;
  if (question.sequences > 0) {
    const int64_t sequences = question.sequences_of_step();
    const int parts = question.data_ranks(question.first_width());
    const int64_t of_rank = sequences / parts;
    std::string text = absl::StrFormat("a step of all ranks: %s sequences of %d tokens, %s tokens",
                                       Grouped(static_cast<double>(sequences)), context,
                                       Grouped(static_cast<double>(sequences * context)));
    const int64_t nearest =
        std::llround(question.batch_tokens / static_cast<double>(context * parts));
    if (nearest > 0 && nearest != of_rank)
      absl::StrAppend(&text, "; ", of_rank, " of a rank cut better than the ", nearest, " of ",
                      Grouped(question.batch_tokens), " tokens");
    return text;
  }
  return absl::StrFormat("a step of a %srank: %d x %d sequences of %d tokens",
                         ShowsTensor(question) ? "data " : "",
                         std::max<int64_t>(1, question.config.gradient_accumulation_steps),
                         std::max<int64_t>(1, question.config.micro_batch_size), context);
}

// "8 data ranks of 8 tensor ranks each, sequence parallel"; "1, 2, 4 or 8 tensor ranks".
std::string TensorText(const Question& question) {
  if (!ShowsTensor(question)) return "";
  const std::vector<int>& widths = question.widths;
  std::string text =
      widths.size() == 1
          ? absl::StrCat(
                question.data_ranks(widths.front()),
                question.data_ranks(widths.front()) == 1 ? " data rank of " : " data ranks of ",
                widths.front(), " tensor ranks each")
          : absl::StrCat(absl::StrJoin(widths.begin(), widths.end() - 1, ", "), " or ",
                         widths.back(), " tensor ranks");
  if (question.pass.sequence_parallel) text += ", which share the rows of norms";
  return text + "\n";
}

// Whose kernels are simulated.
std::string EfficiencyText(const Machine& machine) {
  const auto source = machine.sources.find("gpu_teraflops");
  if (machine.gpu_peak_teraflops <= 0 || source == machine.sources.end()) return "";
  return absl::StrFormat("a trainer with %.0f%% of a GPU's peak (--efficiency), as %s\n",
                         100 * machine.gpu_teraflops / machine.gpu_peak_teraflops, source->second);
}

// The optimizer, if it is not Adam, and how its states are kept, if not in fp32.
std::string OptimizerText(const Config& config) {
  const OptimizerType type = config.optimizer.type;
  const OptimizerStates states = config.optimizer.states;
  std::vector<std::string> parts;
  if (type != OptimizerType::kAdam && type != OptimizerType::kAdamW)
    parts.push_back(absl::StrCat("optimizer ", OptimizerName(config)));
  if (!HasStates(config)) {
    parts.push_back("no optimizer states");
  } else if (states != OptimizerStates::kFloat32) {
    const char* const form = states == OptimizerStates::k8Bit ? "of 8 bits" : "in bf16";
    parts.push_back(type == OptimizerType::kMuon ? absl::StrCat("AdamW's states beside it ", form,
                                                                ", those of its matrices in fp32")
                                                 : absl::StrCat("optimizer states ", form));
  }
  if (parts.empty()) return "";
  if (config.ebb.split_master) parts.push_back("split masters");
  if (config.gradient_clipping == 0) parts.push_back("gradients not clipped");
  if (UpdatesEarly(config)) parts.push_back("updates as gradients come");
  return absl::StrJoin(parts, ", ") + "\n";
}

// Whose activations are counted.
std::string ActivationsText(const Pass& pass) {
  if (pass.compiled) return "activations as torch.compile keeps them, with SDPA\n";
  if (pass.torch) return "activations as eager torch keeps them, with SDPA\n";
  if (pass.own_activations < 0)
    return "activations as examples/gpt keeps them (--activations torch: as eager torch does)\n";
  return absl::StrCat("activations take the given ", sharding::SizeText(pass.own_activations),
                      ", also where blocks are recomputed\n");
}

}  // namespace

std::string Grouped(double number) {
  const std::string digits = absl::StrFormat("%.0f", number);
  std::string grouped;
  for (size_t at = 0; at < digits.size(); ++at) {
    if (at > 0 && (digits.size() - at) % 3 == 0) grouped += ',';
    grouped += digits[at];
  }
  return grouped;
}

std::string ParametersText(int64_t parameters) {
  const auto number = static_cast<double>(parameters);
  return number < 1e9 ? absl::StrFormat("%.4g M", number / 1e6)
                      : absl::StrFormat("%.4g B", number / 1e9);
}

std::string NameOf(const Model& model) {
  constexpr size_t kMost = 40;
  std::string_view name = model.name;
  if (name.size() <= kMost) return config::Shortened(name, kMost);
  name.remove_prefix(name.size() - kMost);
  while (!name.empty() && (static_cast<unsigned char>(name[0]) & 0xc0u) == 0x80u)
    name.remove_prefix(1);
  return absl::StrCat("...", config::Shortened(name, kMost));
}

std::string TrainedText(const Model& model) {
  const int64_t trained = model.trained_parameters();
  if (model.trains.empty() && trained == model.parameters()) return "";
  return absl::StrCat(ParametersText(trained), " of them train", model.trains.empty() ? "" : ": ",
                      model.trains, "\n");
}

bool ShowsTensor(const Question& question) {
  return question.widths.back() > 1;
}

std::string OptimizerName(const Config& config) {
  std::string name;
  auto before = static_cast<int>(config.optimizer.type);
  config::ForEachWord(config::FindKey("optimizer.type")->words, [&](std::string_view word) {
    if (before-- == 0) name = word;
  });
  return name;
}

std::string TitleOf(const Question& question) {
  return absl::StrFormat("%s: %s parameters, %s; %d %s on %s\n%s%s\n", NameOf(question.model),
                         ParametersText(question.model.parameters()),
                         std::string(Name(question.config.compute)), question.ranks,
                         question.ranks == 1 ? "rank" : "ranks",
                         config::Shortened(question.machine.name, 20), BatchText(question),
                         question.model.context > 0 ? ""
                                                    : "; its operations are estimated from its "
                                                      "matrices") +
         TensorText(question) + TrainedText(question.model) + StoredText(question.model) +
         OptimizerText(question.config) + ActivationsText(question.pass) +
         EfficiencyText(question.machine);
}

}  // namespace ebb::planner
