#include "ebb/runtime/planner/batch.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "ebb/runtime/planner/search.h"
#include "ebb/runtime/planner/trials.h"

namespace ebb::planner {
namespace {

// `of_round` 0: all.
Config WithBatch(Config config, int64_t sequences, int64_t micro_batches, int64_t of_round) {
  config.train_batch_size = 0;
  config.micro_batch_size = sequences;
  config.gradient_accumulation_steps = micro_batches;
  config.ebb.micro_batches_per_round = of_round == micro_batches && of_round > 1 ? 0 : of_round;
  return config;
}

// Whether a round costs more than its kernels: gathers, reductions, or copies of gradients.
bool RoundsCost(const Choice& choice) {
  return choice.stage >= 2 || choice.states != Tier::kDevice;
}

// The sequences of a rank in a step.
int64_t SequencesOf(const Config& config) {
  return std::max<int64_t>(1, config.micro_batch_size) *
         std::max<int64_t>(1, config.gradient_accumulation_steps);
}

// `from` with its micro-batch doubled as often as it fits.
std::optional<Answer> WithLargestMicroBatch(const Question& question, const Answer& from) {
  const auto answer = [&](int64_t sequences, Depth depth) {
    return AnswerFor(question,
                     WithBatch(from.config, sequences, from.config.gradient_accumulation_steps,
                               from.config.ebb.micro_batches_per_round),
                     from.choice.recompute, depth);
  };
  std::vector<int64_t> sizes;
  for (int64_t sequences = 2 * std::max<int64_t>(1, from.config.micro_batch_size);
       sequences * question.data_ranks(from.choice.tensor) * question.pass.context <= kLargerTokens;
       sequences *= 2)
    sizes.push_back(sequences);
  const int64_t largest = LargestThatFits(
      sizes, [&](int64_t sequences) { return answer(sequences, Depth::kMemory).fits(); });
  if (largest == 0) return std::nullopt;
  return answer(largest, Depth::kTime);
}

// The fastest step of kLargerTokens, and of four times `from`'s, at its stage and tiers.
std::optional<Answer> FastestWithMoreSequences(const Question& question, const Answer& from) {
  const int ranks = question.data_ranks(from.choice.tensor);
  int64_t of_rank = 4 * SequencesOf(from.config);
  while (of_rank * ranks * question.pass.context < kLargerTokens && of_rank < 1 << 19) of_rank *= 2;
  Question larger = question;
  larger.sequences = of_rank * ranks;
  // Several micro-batches sum their gradients, which only the higher stages divide.
  std::vector<Choice> choices;
  for (const int stage : {from.choice.stage, 3}) {
    Choice choice = from.choice;
    choice.stage = stage;
    choices.push_back(choice);
    for (const Tier boundaries : {Tier::kDevice, Tier::kCpu}) {
      if ((question.machine.is_cpu || question.pass.torch) && boundaries == Tier::kCpu) continue;
      choices.push_back(choice);
      choices.back().recompute = true;
      choices.back().boundaries = boundaries;
    }
    if (stage == 3) break;
  }
  const std::vector<Answer> answers = AnswersOf(
      choices.size(), [&](size_t i) { return AnswerForBatch(larger, choices[i], Depth::kTime); });
  const Answer* const best = Fastest(answers);
  if (best == nullptr) return std::nullopt;
  return *best;
}

}  // namespace

std::vector<int64_t> DivisorsOf(int64_t number) {
  std::vector<int64_t> low, high;
  for (int64_t d = 1; d * d <= number; ++d) {
    if (number % d != 0) continue;
    low.push_back(d);
    if (d * d != number) high.push_back(number / d);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

int64_t SequencesThatCutWell(double about) {
  constexpr double kNear = 0.05;
  const auto cuts_well = [](int64_t number) {
    const std::vector<int64_t> divisors = DivisorsOf(number);
    return std::adjacent_find(divisors.begin(), divisors.end(), [](int64_t less, int64_t more) {
             return more > 2 * less;
           }) == divisors.end();
  };
  const int64_t nearest = std::max<int64_t>(1, std::llround(about));
  const int64_t towards = about < static_cast<double>(nearest) ? -1 : 1;
  for (int64_t away = 0; static_cast<double>(away) <= kNear * about + 1; ++away) {
    for (const int64_t number : {nearest + towards * away, nearest - towards * away}) {
      if (number > 0 && std::abs(static_cast<double>(number) - about) <= kNear * about &&
          cuts_well(number))
        return number;
    }
  }
  return nearest;
}

int64_t LargestThatFits(std::span<const int64_t> numbers,
                        const std::function<bool(int64_t)>& fits) {
  const auto end = std::partition_point(numbers.begin(), numbers.end(), fits);
  return end == numbers.begin() ? 0 : *(end - 1);
}

Question WithGivenBatch(Question question) {
  const Config& config = question.config;
  if (question.sequences > 0 || config.gradient_accumulation_steps <= 1 ||
      config.ebb.micro_batches_per_round != 1 || question.pass.own_activations >= 0)
    return question;
  question.micro_batch = std::max<int64_t>(1, config.micro_batch_size);
  question.sequences = question.micro_batch * config.gradient_accumulation_steps *
                       question.data_ranks(static_cast<int>(config.ebb.mesh.tensor));
  return question;
}

Answer AnswerForBatch(const Question& question, const Choice& choice, Depth depth, double enough) {
  const Config config = question.With(choice);
  int64_t all = question.sequences_of_rank(choice.tensor);
  if (const int64_t given = question.micro_batch; given > 0)
    all = std::max<int64_t>(1, all / given) * given;
  const auto placed = [&](int64_t sequences, int64_t of_round) {
    return WithGradients(question, WithBatch(config, sequences, all / sequences, of_round),
                         choice.recompute);
  };
  const auto answer = [&](int64_t sequences, int64_t of_round, Depth of, double least = 0) {
    return AnswerFor(question, placed(sequences, of_round).config, choice.recompute, of, least);
  };
  const auto fits = [&](int64_t sequences, int64_t of_round) {
    const PlacedGradients tried = placed(sequences, of_round);
    return tried.fits ? *tried.fits
                      : AnswerFor(question, tried.config, choice.recompute, Depth::kMemory).fits();
  };
  std::vector<int64_t> sizes = DivisorsOf(all);
  if (question.micro_batch > 0) sizes = {question.micro_batch};
  const int64_t largest =
      LargestThatFits(sizes, [&](int64_t sequences) { return fits(sequences, 1); });
  if (largest == 0) return answer(sizes.front(), 1, depth);
  std::vector<std::pair<int64_t, int64_t>> tries = {{largest, 1}};
  // Smaller micro-batches, if a round then has half as many sequences more, or all of a step.
  int64_t together = largest;
  for (auto size = std::upper_bound(sizes.begin(), sizes.end(), largest);
       RoundsCost(choice) && together < all && size != sizes.begin();) {
    const int64_t sequences = *--size;
    const int64_t of_round = LargestThatFits(
        DivisorsOf(all / sequences), [&](int64_t number) { return fits(sequences, number); });
    if (const int64_t more = sequences * of_round;
        more <= together || (more < all && 2 * more < 3 * together))
      continue;
    together = sequences * of_round;
    tries.emplace_back(sequences, of_round);
  }
  if (tries.size() == 1) return answer(largest, 1, depth, enough);
  Answer best;
  for (const auto& [sequences, of_round] : tries) {
    const double least = std::max(enough, kWorthIt * SpeedOf(best));
    Answer tried = answer(sequences, of_round, Depth::kTime, least);
    if (SpeedOf(tried) > least || best.memory.empty()) best = std::move(tried);
  }
  return depth == Depth::kTimeAndPeak ? AnswerFor(question, best.config, choice.recompute, depth)
                                      : best;
}

Remedy RemedyForBatch(const Question& asked, const Answer& lacking, Depth depth) {
  const Question question = WithGivenBatch(asked);
  Remedy remedy = RemedyFor(question, lacking, depth);
  if (question.sequences == 0 || !remedy.answer) return remedy;
  Question remedied = question;
  remedied.config = remedy.answer->config;
  const std::string keys = remedy.answer->keys;
  Choice choice = remedy.answer->choice;
  std::vector<Tier> places = {choice.boundaries};
  for (const Choice& each : Choices(question)) {
    if (each.recompute && choice.recompute && each.stage == choice.stage &&
        each.parameters == choice.parameters && each.states == choice.states &&
        each.tensor == choice.tensor && each.boundaries != choice.boundaries)
      places.push_back(each.boundaries);
  }
  for (const Tier boundaries : places) {
    choice.boundaries = boundaries;
    const double enough = SpeedOf(*remedy.answer) * kWorthIt;
    Answer cut = AnswerForBatch(remedied, choice, depth, enough);
    if (SpeedOf(cut) <= enough) continue;
    remedy.answer = std::move(cut);
    remedy.answer->keys = keys;
  }
  return remedy;
}

std::optional<LargerBatch> FindLargerBatch(const Question& question, const Answer& from) {
  if (question.sequences > 0 || question.pass.own_activations >= 0 || !from.time)
    return std::nullopt;
  // The plans of such a model take seconds each.
  const bool one_plan =
      from.config.uses_nvme() &&
      question.model.trained_parameters() / question.ranks > kLargerParametersOnNvme;
  const std::optional<Answer> best =
      one_plan ? WithLargestMicroBatch(question, from) : FastestWithMoreSequences(question, from);
  constexpr double kMuch = 1.05;
  if (!best || SpeedOf(*best) <= SpeedOf(from) * kMuch) return std::nullopt;
  return LargerBatch{.tokens = SequencesOf(best->config) *
                               question.data_ranks(best->choice.tensor) * question.pass.context,
                     .answer = *best};
}

std::vector<Answer> FastestOfOtherWidths(const Question& question) {
  std::vector<Answer> fastest;
  if (question.pass.own_activations >= 0) return fastest;
  Question other = question;
  if (other.sequences == 0)
    other.sequences = std::max<int64_t>(1, question.config.micro_batch_size) *
                      std::max<int64_t>(1, question.config.gradient_accumulation_steps) *
                      question.data_ranks(question.first_width());
  for (const auto& [width, model] : question.over_tensor) {
    if (std::count(question.widths.begin(), question.widths.end(), width) > 0) continue;
    other.widths = {1, width};
    const std::vector<int> possible = other.possible_widths();
    if (possible.empty() || possible.back() != width) continue;
    other.widths = {width};
    std::optional<Answer> best;
    std::set<std::pair<int, bool>> fitting;  // stages, without and with recomputation
    for (const Choice& choice : Choices(other)) {
      // Places further down than the first that fit are not faster.
      if (fitting.contains({choice.stage, choice.recompute})) continue;
      const double enough = best ? kWorthIt * SpeedOf(*best) : 0;
      Answer answer = AnswerForBatch(other, choice, Depth::kTime, enough);
      if (answer.fits()) fitting.insert({choice.stage, choice.recompute});
      if (SpeedOf(answer) > enough) best = std::move(answer);
    }
    if (best) fastest.push_back(*std::move(best));
  }
  return fastest;
}

}  // namespace ebb::planner
