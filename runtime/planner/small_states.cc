#include "ebb/runtime/planner/small_states.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/config/difference.h"
#include "ebb/runtime/planner/search.h"
#include "ebb/runtime/planner/trials.h"

namespace ebb::planner {

bool HasStates(const Config& config) {
  if (!optim::StateNames(config.optimizer).empty()) return true;
  const auto& groups = config.ebb.parameter_groups;
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) {
    const std::optional<OptimizerConfig>& own = group.second.optimizer;
    return own && !optim::StateNames(*own).empty();
  });
}

Config WithSmallStates(Config config) {
  if (HasStates(config)) config.optimizer.states = OptimizerStates::k8Bit;
  config.gradient_clipping = 0;
  // Either switch turns the check of bf16 off. Both are off, so that no file says both.
  config.ebb.check_overflow = false;
  if (config.compute == DType::kBFloat16) config.bf16_check_grad_overflow = false;
  // Masters that no update rounds at random, and of 16-bit parameters alone.
  if (config.compute == DType::kBFloat16 && !config.ebb.stochastic_rounding)
    config.ebb.split_master = true;
  return config;
}

std::string WhatSmallStatesChange(const Config& small) {
  const bool is_muon = small.optimizer.type == OptimizerType::kMuon;
  return absl::StrCat(!HasStates(small) ? ""
                      : is_muon         ? "AdamW's states beside Muon's are rounded to 8 bits, "
                                        : "optimizer states are rounded to 8 bits, ",
                      small.checks_overflow()
                          ? "gradients are not clipped"
                          : "gradients are neither clipped nor checked for overflow");
}

std::optional<SmallStates> FindSmallStates(const Question& question, const Answer* from) {
  constexpr double kMuch = 1.05;
  const bool fits = from != nullptr && from->fits();
  const Config& before = from == nullptr ? question.config : from->config;
  if (before.optimizer.states != OptimizerStates::kFloat32) return std::nullopt;
  if (fits && from->choice.states == Tier::kDevice && from->choice.parameters == Tier::kDevice)
    return std::nullopt;
  Question small = question;
  small.config = WithSmallStates(question.config);
  if (small.config == question.config) return std::nullopt;
  const double least = from == nullptr ? 0 : kMuch * SpeedOf(*from);
  std::optional<Answer> best;
  if (question.sequences > 0) {
    std::vector<Answer> answers = AnswerAll(small);
    if (const Answer* const fastest = Fastest(answers); fastest != nullptr) best = *fastest;
  } else {
    // The first that fits of a stage and tiers: the others recompute, and are not faster.
    std::vector<Try> tries;
    std::optional<Choice> last;
    for (const Choice& choice : Choices(small)) {
      if (last && last->stage == choice.stage && last->parameters == choice.parameters &&
          last->states == choice.states)
        continue;
      PlacedGradients placed = WithGradients(small, small.With(choice), choice.recompute);
      const auto takes = [&] {
        return AnswerFor(small, placed.config, choice.recompute, Depth::kMemory).fits();
      };
      if (!(placed.fits ? *placed.fits : takes())) continue;
      last = choice;
      tries.push_back({.what = "",
                       .question = &small,
                       .config = std::move(placed.config),
                       .recompute = choice.recompute});
    }
    // Those with least on NVMe are fastest, so that most others are not simulated.
    const auto slow = [](const Try& each) {
      const ZeroConfig& zero = each.config.zero;
      return (zero.offload_optimizer.device == Tier::kNvme) +
             (zero.offload_param.device == Tier::kNvme);
    };
    std::stable_sort(tries.begin(), tries.end(),
                     [&](const Try& a, const Try& b) { return slow(a) < slow(b); });
    if (std::optional<Tried> tried = FastestOf(tries, least)) best = std::move(tried->answer);
  }
  if (!best || SpeedOf(*best) <= least) return std::nullopt;
  std::string keys = config::Difference(before, best->config);
  return SmallStates{.answer = *std::move(best), .keys = std::move(keys)};
}

}  // namespace ebb::planner
