#include "ebb/runtime/planner/offers.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/planner/batch.h"

namespace ebb::planner {
namespace {

// More hosts must make tokens cheaper by more than this factor.
constexpr double kWorthIt = 1.005;

double Speed(const Answer& answer) {
  return answer.fits() && answer.time ? answer.time->tokens_per_second : 0;
}

// The fastest of all choices that fit, or what a remedy makes of the smallest.
std::optional<Answer> BestOf(const Question& question) {
  const std::vector<Answer> answers = AnswerAll(question);
  const Answer* const fastest = Fastest(answers);
  if (fastest == nullptr) return RemedyForBatch(question, answers.back(), Depth::kTime).answer;
  return *fastest;
}

// Why no more hosts than half of these were tried.
std::string TooFewText(const Question& question, int hosts) {
  std::string text =
      absl::StrCat(question.sequences, question.sequences == 1 ? " sequence of " : " sequences of ",
                   question.pass.context, " tokens a step: they must be at least one for each of ",
                   question.data_ranks(question.widths.back()),
                   question.widths.back() == 1 ? " ranks" : " data ranks");
  if (hosts > 1)
    text = absl::StrCat("it does not fit on ", hosts / 2, hosts == 2 ? " host" : " hosts",
                        ", and for more a step has too few sequences: ", text);
  return text;
}

}  // namespace

std::string OtherParallelism(const Question& question) {
  constexpr int64_t kLarge = 60'000'000'000, kLong = 1 << 17;
  constexpr int kMany = 512, kSome = 64;
  std::string ranks, from;
  const auto add = [&](const char* kind, const char* size) {
    absl::StrAppend(&ranks, ranks.empty() ? "" : ", ", kind);
    absl::StrAppend(&from, from.empty() ? "" : ", ", size);
  };
  const bool has_tensor = question.widths.back() > 1;
  if (question.ranks >= kMany || (question.ranks >= kSome && question.model.parameters() >= kLarge))
    add(has_tensor ? "pipeline" : "tensor and pipeline",
        "60 B parameters on 64 GPUs or any model on 512");
  if (question.pass.context >= kLong) add("context", "131,072 tokens a sequence");
  if (question.model.experts > 1 && question.ranks > 1) add("expert", "several experts a GPU");
  if (ranks.empty()) return "";
  return absl::StrCat(
      has_tensor ? "Only data and tensor ranks are planned."
                 : "Only data ranks are planned (--tensor auto: tensor ranks, too).",
      " Other programs also cut such a model over ", ranks, " ranks (from about ", from, ")");
}

double Offer::price_of(double tokens) const {
  constexpr double kHour = 3600;
  return hosts == 0 ? 0 : price_an_hour * hosts * tokens / Speed(*answer) / kHour;
}

double Offer::hours_of(double tokens) const {
  constexpr double kHour = 3600;
  return hosts == 0 ? 0 : tokens / Speed(*answer) / kHour;
}

void FillOffer(Question question, Offer& offer) {
  question.machine = offer.machine;
  const int most = offer.machine.network_gb_s > 0 ? kHostsMax : 1;
  double least = 0;  // hosts for a token a second
  offer.lacks = "it does not fit on any number of hosts";
  for (int hosts = 1; hosts <= most; hosts *= 2) {
    if (offer.hosts > 0 && hosts > offer.hosts * kHostsAhead) return;
    question.ranks = static_cast<int>(offer.machine.gpus) * hosts;
    if (question.widths.size() == 1 && question.ranks % question.widths.front() != 0) {
      if (offer.hosts == 0)
        offer.lacks = absl::StrCat(question.ranks, " ranks cannot be divided into tensor ranks of ",
                                   question.widths.front());
      continue;
    }
    if (question.possible_widths().empty() ||
        (question.sequences > 0 &&
         question.data_ranks(question.widths.back()) > question.sequences)) {
      if (offer.hosts == 0) offer.lacks = TooFewText(question, hosts);
      return;
    }
    const std::optional<Answer> best = BestOf(question);
    if (!best) {
      if (offer.hosts == 0) offer.lacks = "it does not fit on any number of hosts";
      continue;
    }
    const double of_token = hosts / Speed(*best);
    if (offer.hosts > 0 && of_token * kWorthIt >= least) continue;
    least = of_token;
    offer.hosts = hosts;
    offer.answer = best;
    offer.lacks = "";
  }
}

const Offer* Cheapest(std::span<const Offer> offers) {
  constexpr double kTokens = 1;
  const Offer* cheapest = nullptr;
  for (const Offer& offer : offers) {
    const double price = offer.price_of(kTokens);
    if (price > 0 && (cheapest == nullptr || price < cheapest->price_of(kTokens)))
      cheapest = &offer;
  }
  return cheapest;
}

}  // namespace ebb::planner
