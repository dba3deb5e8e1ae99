#include "ebb/runtime/planner/search.h"

#include <algorithm>
#include <functional>
#include <list>
#include <numeric>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/difference.h"
#include "ebb/runtime/planner/batch.h"
#include "ebb/runtime/planner/trials.h"

namespace ebb::planner {
namespace {

std::vector<Tier> TiersOf(const Machine& machine) {
  std::vector<Tier> tiers = {Tier::kDevice};
  if (!machine.is_cpu) tiers.push_back(Tier::kCpu);  // a CPU's RAM is the device's memory
  if (machine.disk > 0) tiers.push_back(Tier::kNvme);
  return tiers;
}

// The model with so many blocks: its own, and more like its last. Blocks follow each other, each
// with a unit of its own.
absl::StatusOr<Model> WithBlocks(const Model& model, int64_t blocks) {
  const auto is_block = [](const ModelVisit& visit) { return visit.is_block; };
  const auto begin = model.visits.begin(), end = model.visits.end();
  const auto first = std::find_if(begin, end, is_block),
             last = std::find_if_not(first, end, is_block);
  if (first == end)
    return absl::InvalidArgumentError("--largest model: this model has no equal blocks to add");
  const int unit = first->unit, more = static_cast<int>(blocks - (last - first));
  Model made = model;
  made.units.assign(model.units.begin(), model.units.begin() + unit);
  made.visits.assign(begin, first);
  for (int block = 0; block < blocks; ++block) {
    const auto like = std::min<int64_t>(block, last - first - 1);
    made.visits.push_back(first[like]);
    made.visits.back().unit = unit + block;
    ModelUnit& copy = made.units.emplace_back(model.units[first[like].unit]);
    copy.name = absl::StrCat("block", block);
    for (ModelTensor& tensor : copy.tensors)
      tensor.name = absl::StrCat(copy.name, ".", tensor.name);
  }
  made.units.insert(made.units.end(), model.units.begin() + unit + (last - first),
                    model.units.end());
  for (auto visit = last; visit != end; ++visit) {
    made.visits.push_back(*visit);
    if (visit->unit > unit) made.visits.back().unit += more;
  }
  return made;
}

absl::StatusOr<Question> With(const Question& question, Quantity quantity, int64_t number) {
  Question changed = question;
  const auto for_each_model = [&](const auto& change) -> absl::Status {
    EBB_RETURN_IF_ERROR(change(changed.model));
    for (auto& [width, model] : changed.over_tensor) EBB_RETURN_IF_ERROR(change(model));
    return absl::OkStatus();
  };
  switch (quantity) {
    case Quantity::kModel:
      EBB_RETURN_IF_ERROR(for_each_model([&](Model& model) -> absl::Status {
        EBB_ASSIGN_OR_RETURN(model, WithBlocks(model, number));
        return absl::OkStatus();
      }));
      break;
    case Quantity::kBatch:
      changed.config.micro_batch_size = number;
      changed.config.train_batch_size = 0;
      break;
    case Quantity::kContext:
      changed.pass.context = number;
      EBB_RETURN_IF_ERROR(for_each_model([&](Model& model) {
        model.GrowPositions(number);
        return absl::OkStatus();
      }));
  }
  return changed;
}

std::vector<Answer> AnswersOfAll(const Question& question, std::span<const Choice> choices) {
  return AnswersOf(choices.size(), [&](size_t i) {
    const bool recompute = choices[i].recompute;
    return AnswerFor(question, WithGradients(question, question.With(choices[i]), recompute).config,
                     recompute, Depth::kTime);
  });
}

// The change of the fastest try, if that is faster than `from`.
std::optional<Change> ChangeOf(std::span<const Try> tries, const Answer& from) {
  const std::optional<Tried> best = FastestOf(tries, SpeedOf(from) * kWorthIt);
  if (!best) return std::nullopt;
  return Change{.what = tries[best->number].what, .tokens_per_second = SpeedOf(best->answer)};
}

// Free RAM holds a part of what is on NVMe. An eighth of it stays free, and less is not worth a key.
// Parameters come first: a step reads them at least twice, so that a byte of them saves more
// transfers than a byte of states.
std::optional<Config> ConfigWithFreeRam(const Question& question, const Answer& from) {
  const int64_t free = from.room[1] - from.held[1], taken = free - free / 8;
  if (!from.config.uses_nvme() || free <= from.room[1] / 8) return std::nullopt;
  Config config = from.config;
  config.ebb.host_memory = (from.held[1] + taken) >> 20 << 20;
  if (config.zero.offload_param.device == Tier::kNvme) {
    const int64_t all = question.model.parameters() / question.data_ranks(from.choice.tensor) + 1;
    config.zero.offload_param.max_in_cpu =
        std::max(config.zero.offload_param.max_in_cpu, std::min(all, taken / 8 * 3));
  }
  return config;
}

// Gathers further ahead, in free memory of the GPU. A large unit, as an embedding, takes longer to come
// than one block computes.
std::vector<Config> ConfigsWithGathersAhead(const Question& question, const Answer& from) {
  const ZeroConfig& zero = from.config.zero;
  std::vector<Config> configs;
  if (zero.stage < 3 || (question.ranks == 1 && zero.offload_param.device == Tier::kDevice))
    return configs;
  const int64_t largest = question.model.largest_unit();
  for (int64_t ahead = from.config.ebb.prefetch_depth + 1; ahead <= 3; ++ahead) {
    Config& config = configs.emplace_back(from.config);
    config.ebb.prefetch_depth = ahead;
    config.zero.prefetch_bucket_size = std::max(zero.prefetch_bucket_size, 2 * ahead * largest);
    config.zero.max_live_parameters = std::max(zero.max_live_parameters, 2 * (ahead + 1) * largest);
  }
  return configs;
}

// Free memory of the GPU holds a part of the states that are below it.
std::optional<Config> ConfigWithFreeGpu(const Question& question, const Answer& from) {
  constexpr int kHundredths = 100;
  const int64_t free = from.room[0] - from.held[0];
  if (question.machine.is_cpu || from.config.optimizer_tier() == Tier::kDevice ||
      from.config.zero.offload_optimizer.ratio != 1 || free <= 0)
    return std::nullopt;
  Config config = from.config;
  const auto keep = [&](int64_t hundredths) {
    config.zero.offload_optimizer.ratio =
        static_cast<double>(kHundredths - hundredths) / kHundredths;
  };
  const auto fits = [&](int64_t hundredths) {
    keep(hundredths);
    const Answer answer = AnswerFor(question, config, from.choice.recompute, Depth::kMemory);
    return answer.fits() && answer.held[0] <= from.room[0] - free / 8;
  };
  std::vector<int64_t> shares(kHundredths - 1);
  std::iota(shares.begin(), shares.end(), 1);
  const int64_t most = LargestThatFits(shares, fits);
  if (most == 0) return std::nullopt;
  keep(most);
  return config;
}

// The settings of `like` for another model, context or batch.
Answer AnswerLike(const Question& question, const Answer& like, Depth depth) {
  Config config = like.config;
  if (question.config.micro_batch_size > 0) {
    config.micro_batch_size = question.config.micro_batch_size;
    config.train_batch_size = 0;
  }
  Answer answer = AnswerFor(question, config, like.choice.recompute, depth);
  answer.keys = like.keys;
  return answer;
}

// The largest that fits with one of the choices, which rise in what they offload; `remedied`: or
// with what RemedyFor makes of the last without moving its states.
absl::StatusOr<Largest> LargestOf(const Question& question, Quantity quantity,
                                  std::span<const Choice> choices, bool remedied) {
  const int64_t most = FactsOf(quantity).most;
  Largest found{.question = question};
  // A context is searched in multiples of 64.
  const auto unit = [&] {
    return quantity == Quantity::kContext && found.most >= 1024 ? int64_t{64} : int64_t{1};
  };
  const auto next = [&] { return found.most + unit(); };
  using Answering = std::function<Answer(const Question&)>;
  const auto fits = [&](int64_t number, const Answering& answering) -> absl::StatusOr<bool> {
    EBB_ASSIGN_OR_RETURN(Question changed, With(question, quantity, number));
    Answer answer = answering(changed);
    if (!answer.fits()) return false;
    found = {.most = number, .question = std::move(changed), .answer = std::move(answer)};
    return true;
  };
  // Looks for more than what is found. False: not even one unit more fits.
  const auto extend = [&](const Answering& answering) -> absl::StatusOr<bool> {
    if (next() > most) return false;
    EBB_ASSIGN_OR_RETURN(const bool extended, fits(next(), answering));
    if (!extended) return false;
    int64_t too_many = most + 1;
    for (int64_t number = 2 * found.most; number < too_many; number *= 2) {
      EBB_ASSIGN_OR_RETURN(const bool fitted, fits(number, answering));
      if (!fitted) too_many = number;
    }
    while (next() < too_many) {
      const int64_t number = (found.most + (too_many - found.most) / 2) / unit() * unit();
      if (number <= found.most) break;
      EBB_ASSIGN_OR_RETURN(const bool fitted, fits(number, answering));
      if (!fitted) too_many = number;
    }
    return true;
  };
  // One choice after the other, those that need least of the device's memory first. Most of the
  // others do not fit with one more, and are searched no further.
  for (auto choice = choices.rbegin(); choice != choices.rend(); ++choice)
    EBB_RETURN_IF_ERROR(extend([&](const Question& of) {
                          return AnswerFor(of, *choice, Depth::kMemory);
                        }).status());
  // A remedy for one more is searched further with its keys, until there is no other.
  for (bool extended = remedied; extended && next() <= most;) {
    EBB_ASSIGN_OR_RETURN(const Question more, With(question, quantity, next()));
    const Answer least = AnswerFor(more, choices.back(), Depth::kMemory);
    const std::optional<Answer> remedy = RemedyFor(more, least, Depth::kMemory).answer;
    if (!remedy || remedy->choice.states != least.choice.states) break;
    EBB_ASSIGN_OR_RETURN(extended, extend([&](const Question& of) {
                           return AnswerLike(of, *remedy, Depth::kMemory);
                         }));
  }
  found.is_limit = found.most == most;
  if (found.most == 0) {
    EBB_ASSIGN_OR_RETURN(found.question, With(question, quantity, 1));
    found.answer = AnswerFor(found.question, choices.back(), Depth::kMemory);
  } else if (!found.answer.keys.empty()) {
    found.answer = AnswerLike(found.question, found.answer, Depth::kTime);
  } else {
    // The fastest of all choices that fit with it.
    const std::vector<Answer> answers = AnswersOfAll(found.question, choices);
    if (const Answer* const best = Fastest(answers)) found.answer = *best;
  }
  return found;
}

}  // namespace

PlacedGradients WithGradients(const Question& question, Config config, bool recompute) {
  const Tier states = config.optimizer_tier();
  const int64_t of_round = config.ebb.micro_batches_per_round,
                micro_batches = config.gradient_accumulation_steps;
  if (!UpdatesEarly(config) || states == Tier::kDevice || config.ebb.offload_gradients ||
      (micro_batches > 1 && of_round != 0 && of_round != micro_batches))
    return {std::move(config), std::nullopt};
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    if (tier == Tier::kNvme && states != Tier::kNvme) break;
    Config placed = config;
    if (tier != Tier::kCpu) placed.ebb.offload_gradients = tier;  // RAM is the default
    if (AnswerFor(question, placed, recompute, Depth::kMemory).fits())
      return {std::move(placed), true};
  }
  return {std::move(config), false};  // in RAM, as was tried
}

std::vector<Choice> Choices(const Question& question) {
  const std::vector<Tier> tiers = TiersOf(question.machine);
  std::vector<Choice> choices;
  for (int stage = 0; stage <= 3; ++stage) {
    for (const Tier parameters : tiers) {
      if (stage < 3 && parameters != Tier::kDevice) continue;
      for (const Tier states : tiers) {
        if (stage == 0 && states != Tier::kDevice) continue;
        for (const int width : question.possible_widths()) {
          const Choice choice{
              .stage = stage, .parameters = parameters, .states = states, .tensor = width};
          choices.push_back(choice);
          for (const Tier boundaries : tiers) {
            if (question.pass.torch && boundaries != Tier::kDevice) continue;
            if (boundaries == Tier::kNvme &&
                (question.sequences == 0 ||
                 (parameters == Tier::kDevice && states == Tier::kDevice)))
              continue;
            choices.push_back(choice);
            choices.back().boundaries = boundaries;
            choices.back().recompute = true;
          }
        }
      }
    }
  }
  return choices;
}

std::vector<Answer> AnswerAll(const Question& question) {
  const Question cut = WithGivenBatch(question);
  const std::vector<Choice> choices = Choices(cut);
  if (cut.sequences == 0) return AnswersOfAll(question, choices);
  return AnswersOf(choices.size(),
                   [&](size_t i) { return AnswerForBatch(cut, choices[i], Depth::kTime); });
}

const Answer* Fastest(std::span<const Answer> answers) {
  double most = 0;
  for (const Answer& answer : answers) most = std::max(most, SpeedOf(answer));
  if (most == 0) return nullptr;
  return &*std::find_if(answers.begin(), answers.end(),
                        [&](const Answer& answer) { return SpeedOf(answer) * kWorthIt >= most; });
}

std::optional<Change> BestChange(const Question& question, const Answer& from) {
  const Choice& choice = from.choice;
  // Given activations are those of one batch, with or without recomputing.
  const bool has_own_activations = question.pass.own_activations >= 0;
  std::vector<Try> tries;
  const auto add = [&](const Config& config, const char* remark = "") {
    tries.push_back({.what = config::Difference(from.config, config) + remark,
                     .question = &question,
                     .config = config,
                     .recompute = choice.recompute});
  };
  Question asked = question;
  asked.config = from.config;
  const auto choose = [&](auto Choice::*setting, auto value) {
    Choice other = choice;
    other.*setting = value;
    if (!(other == choice)) add(asked.With(other));
  };
  // First, because few others are faster, and those are then not simulated.
  const auto twice = [&](int64_t Config::*batch) {
    Config config = from.config;
    config.*batch = std::max<int64_t>(1, config.*batch) * 2;
    config.train_batch_size *= 2;
    add(config, " (a larger batch, which trains differently)");
  };
  if (question.sequences == 0) {
    if (!has_own_activations) twice(&Config::micro_batch_size);
    twice(&Config::gradient_accumulation_steps);
  }
  for (int stage = 0; stage <= 3; ++stage) choose(&Choice::stage, stage);
  for (const Tier tier : TiersOf(question.machine)) {
    for (Tier Choice::*const of : {&Choice::parameters, &Choice::states, &Choice::boundaries})
      choose(of, tier);
  }
  if (!has_own_activations) {
    choose(&Choice::recompute, !choice.recompute);
    tries.back().recompute = !choice.recompute;
    tries.back().what = choice.recompute ? "keeping activations, not recomputing"
                                         : "recomputing blocks in backward";
  }
  Config config = from.config;
  if (const int64_t count = config.gradient_accumulation_steps; count > 1 && !has_own_activations) {
    const auto fits = [&](int64_t of_round) {
      config.ebb.micro_batches_per_round = of_round;
      return AnswerFor(question, config, choice.recompute, Depth::kMemory).fits();
    };
    std::set<int64_t> rounds = {0, 1, LargestThatFits(DivisorsOf(count), fits) % count};
    rounds.erase(from.config.ebb.micro_batches_per_round);
    for (const int64_t of_round : rounds) {
      config.ebb.micro_batches_per_round = of_round;
      add(config);
      if (of_round != 0) continue;
      // A round of all has as many boundary activations, which may have to leave the device.
      for (const Tier tier : TiersOf(question.machine)) {
        Config placed = config;
        placed.ebb.offload_activations = tier;
        if (tier != choice.boundaries) add(placed);
      }
    }
  }
  if (const std::optional<Config> with_ram = ConfigWithFreeRam(question, from)) add(*with_ram);
  if (const std::optional<Config> with_gpu = ConfigWithFreeGpu(question, from)) add(*with_gpu);
  config = from.config;
  config.ebb.offload_gradients = Tier::kDevice;
  if (choice.states != Tier::kDevice) add(config);
  if (choice.stage == 3) {
    config = from.config;
    const Model* const model = question.model_over(choice.tensor);
    const int64_t largest = model == nullptr ? 0 : model->largest_unit();
    config.zero.prefetch_bucket_size = 2 * largest;
    config.zero.max_live_parameters = std::max(config.zero.max_live_parameters, 4 * largest);
    add(config);
    config = from.config;
    config.ebb.reshard_after_forward = false;
    add(config);
  }
  return ChangeOf(tries, from);
}

std::optional<Answer> WithFreeMemory(const Question& question, const Answer& from, Depth depth) {
  Answer best = from;
  const auto take_fastest = [&](const std::vector<Config>& configs) {
    std::vector<Try> tries;
    for (const Config& config : configs)
      tries.push_back({.what = "",
                       .question = &question,
                       .config = config,
                       .recompute = from.choice.recompute});
    if (std::optional<Tried> tried = FastestOf(tries, kWorthIt * SpeedOf(best)))
      best = std::move(tried->answer);
  };
  take_fastest(ConfigsWithGathersAhead(question, from));
  std::vector<Answer> bases = {best};
  // The GPU then has more states instead, and copies of gradients wait for no slot.
  if (best.config.ebb.offload_gradients == Tier::kDevice &&
      !question.config.ebb.offload_gradients) {
    Config config = best.config;
    config.ebb.offload_gradients.reset();
    bases.push_back(AnswerFor(question, config, from.choice.recompute, Depth::kMemory));
  }
  std::vector<Config> configs;
  for (const Answer& base : bases) {
    std::optional<Config> with_gpu = ConfigWithFreeGpu(question, base);
    if (!with_gpu) continue;
    const Answer answer = AnswerFor(question, *with_gpu, from.choice.recompute, Depth::kMemory);
    if (std::optional<Config> with_both = ConfigWithFreeRam(question, answer))
      configs.push_back(*std::move(with_both));
    configs.push_back(*std::move(with_gpu));
  }
  if (std::optional<Config> with_ram = ConfigWithFreeRam(question, best))
    configs.push_back(*std::move(with_ram));
  take_fastest(configs);
  if (best.config == from.config) return std::nullopt;
  if (depth == Depth::kTimeAndPeak)
    best = AnswerFor(question, best.config, from.choice.recompute, depth);
  best.keys = config::Difference(from.config, best.config);
  return best;
}

std::optional<Change> BestPurchase(const Question& question, const Answer& from) {
  if (!from.time) return std::nullopt;
  using sharding::Resource;
  struct Part {
    const char* name;
    std::vector<Resource> resources;
    std::vector<double Machine::*> rates;
  };
  std::vector<Part> parts = {
      {"the GPUs' arithmetic", {Resource::kDevice}, {&Machine::gpu_teraflops}},
      {"the GPUs' bandwidth", {Resource::kDeviceMemory}, {&Machine::gpu_memory_gb_s}},
      {"the RAM's bandwidth", {Resource::kHostMemory}, {&Machine::ram_gb_s}},
      {"PCIe's bandwidth", {Resource::kToDevice, Resource::kToHost}, {&Machine::pcie_gb_s}},
      {"the GPUs' links", {Resource::kPeers}, {&Machine::link_gb_s}},
      {"the network", {Resource::kNetwork}, {&Machine::network_gb_s}},
      {"the disks",
       {Resource::kDiskRead, Resource::kDiskWrite, Resource::kDisk},
       {&Machine::disk_read_gb_s, &Machine::disk_write_gb_s, &Machine::disk_both_gb_s}},
      {"the cores", {Resource::kCores}, {&Machine::cores}}};
  if (question.machine.is_cpu) parts.back().rates.push_back(&Machine::gpu_teraflops);
  const auto critical_seconds = [&](const Part& part) {
    double seconds = 0;
    for (const Resource resource : part.resources) {
      const auto of = static_cast<int>(resource);
      // Kernels and the exchanges of layers take turns, so that neither fills a resource alone.
      const bool takes_turns = resource == Resource::kDevice || resource == Resource::kPeers ||
                               resource == Resource::kNetwork;
      seconds += from.time->simulated.critical.resources[of];
      if (takes_turns && from.choice.tensor > 1) seconds += from.time->simulated.busy.resources[of];
    }
    return seconds;
  };
  std::list<Question> with;
  std::vector<Try> tries;
  // First what the step waits for most, because the others are then mostly not simulated.
  std::stable_sort(parts.begin(), parts.end(), [&](const Part& a, const Part& b) {
    return critical_seconds(a) > critical_seconds(b);
  });
  for (const Part& part : parts) {
    if (critical_seconds(part) <= 0) break;
    Question& richer = with.emplace_back(question);
    for (double Machine::*const rate : part.rates) richer.machine.*rate *= 2;
    tries.push_back({.what = absl::StrCat("twice ", part.name),
                     .question = &richer,
                     .config = from.config,
                     .recompute = from.choice.recompute});
  }
  return ChangeOf(tries, from);
}

absl::StatusOr<Largest> FindLargest(const Question& question, Quantity quantity,
                                    const std::optional<Choice>& asked) {
  if (asked) return LargestOf(question, quantity, {&*asked, 1}, /*remedied=*/false);
  std::optional<Largest> found;
  std::vector<std::pair<Tier, int64_t>> with_states;
  for (const Tier states : TiersOf(question.machine)) {
    std::vector<Choice> choices = Choices(question);
    std::erase_if(choices, [&](const Choice& choice) { return choice.states != states; });
    EBB_ASSIGN_OR_RETURN(Largest there, LargestOf(question, quantity, choices, /*remedied=*/true));
    with_states.emplace_back(states, there.most);
    // The fastest of places for as many; if not one fits, the last, which needs least memory.
    if (!found || there.most > found->most ||
        (there.most == found->most &&
         (there.most == 0 || SpeedOf(there.answer) > kWorthIt * SpeedOf(found->answer))))
      found = std::move(there);
  }
  found->with_states = std::move(with_states);
  return *std::move(found);
}

}  // namespace ebb::planner
