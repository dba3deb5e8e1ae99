#include "ebb/runtime/planner/search.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/difference.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/core_share.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::planner {
namespace {

using sharding::Resource;

// A change must make the step faster by more than this factor.
constexpr double kWorthIt = 1.005;

double Speed(const Answer& answer) {
  return answer.fits() && answer.time ? answer.time->tokens_per_second : 0;
}

// The change as JSON to merge into a configuration file, or in words if no key says it.
std::string Described(const Answer& from, const Choice& choice, const Config& changed) {
  if (from.choice.recompute != choice.recompute)
    return choice.recompute ? "recomputing blocks in backward"
                            : "keeping activations, not recomputing";
  return config::Difference(from.config, changed);
}

std::vector<Tier> TiersOf(const Machine& machine) {
  std::vector<Tier> tiers = {Tier::kDevice};
  if (!machine.is_cpu) tiers.push_back(Tier::kCpu);  // a CPU's RAM is the device's memory
  if (machine.disk > 0) tiers.push_back(Tier::kNvme);
  return tiers;
}

// The choices that differ from this one in one setting.
std::vector<Choice> Neighbours(const Choice& choice, const Machine& machine) {
  std::vector<Choice> neighbours;
  const auto add = [&](auto Choice::*setting, auto value) {
    if (choice.*setting == value) return;
    neighbours.push_back(choice);
    neighbours.back().*setting = value;
  };
  for (int stage = 0; stage <= 3; ++stage) add(&Choice::stage, stage);
  for (const Tier tier : TiersOf(machine)) {
    for (Tier Choice::*const of : {&Choice::parameters, &Choice::states, &Choice::boundaries})
      add(of, tier);
  }
  add(&Choice::recompute, !choice.recompute);
  return neighbours;
}

// The model with so many blocks, all like its first.
absl::StatusOr<Model> WithBlocks(const Model& model, int64_t blocks) {
  const auto first = std::find_if(model.visits.begin(), model.visits.end(),
                                  [](const ModelVisit& visit) { return visit.is_block; });
  if (first == model.visits.end())
    return absl::InvalidArgumentError("--largest model: this model has no equal blocks to add");
  Model made = model;
  made.units.clear();
  made.visits.clear();
  std::vector<int> unit_now(model.units.size(), -1);
  const auto visit = [&](ModelVisit each, const ModelUnit& unit, int& now) {
    if (now < 0) {
      now = static_cast<int>(made.units.size());
      made.units.push_back(unit);
    }
    each.unit = now;
    made.visits.push_back(each);
  };
  for (const ModelVisit& each : model.visits) {
    const auto unit = static_cast<size_t>(each.unit);
    if (!each.is_block) {
      visit(each, model.units[unit], unit_now[unit]);
      continue;
    }
    if (&each != &*first) continue;
    for (int64_t block = 0; block < blocks; ++block) {
      ModelUnit copy = model.units[unit];
      copy.name = absl::StrCat("block", block);
      for (ModelTensor& tensor : copy.tensors)
        tensor.name = absl::StrCat(copy.name, ".", tensor.name);
      int none = -1;
      visit(each, copy, none);
    }
  }
  return made;
}

absl::StatusOr<Question> With(const Question& question, Quantity quantity, int64_t number) {
  Question changed = question;
  switch (quantity) {
    case Quantity::kModel: {
      absl::StatusOr<Model> model = WithBlocks(question.model, number);
      if (!model.ok()) return model.status();
      changed.model = *std::move(model);
      break;
    }
    case Quantity::kBatch:
      changed.config.micro_batch_size = number;
      changed.config.train_batch_size = 0;
      break;
    case Quantity::kContext:
      changed.pass.context = number;
      changed.model.GrowPositions(number);
  }
  return changed;
}

// Tries the choices that need least of the device's memory first.
std::optional<Answer> AnyThatFits(const Question& question, std::vector<Choice> choices) {
  std::reverse(choices.begin(), choices.end());
  for (const Choice& choice : choices) {
    Answer answer = AnswerFor(question, choice, Depth::kMemory);
    if (answer.fits()) return answer;
  }
  return std::nullopt;
}

// The choice that needs least of the device's memory, with the keys that let it fit.
std::optional<Answer> Remedied(const Question& question, const Choice& choice, Depth depth) {
  const Answer changed = AnswerFor(question, choice, Depth::kMemory);
  return AnswerOf(question, RemedyFor(question, changed), changed, depth);
}

// A change, and its answer, which may be computed beside others.
struct Try {
  std::string change;
  std::function<Answer()> answer;
};

// In their order. A try of 700 blocks takes 0.8 GB.
std::vector<Answer> AnswersOf(const std::vector<Try>& tries) {
  if (tries.empty()) return {};
  std::vector<Answer> answers(tries.size());
  constexpr int kAtOnce = 8;
  const int count = static_cast<int>(tries.size());
  ThreadTeam team(std::min({CoreShare::Cores(), kAtOnce, count}), /*parts_per_thread=*/count);
  team.Run(std::ssize(tries), /*grain=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) answers[i] = tries[i].answer();
  });
  return answers;
}

std::vector<Answer> AnswersOf(const Question& question, std::span<const Choice> choices) {
  std::vector<Try> tries;
  for (const Choice& choice : choices)
    tries.push_back({.change = "", .answer = [&question, &choice] {
                       return AnswerFor(question, choice, Depth::kTime);
                     }});
  return AnswersOf(tries);
}

// The fastest of all choices that fit, or what a remedy makes of the smallest.
std::optional<Answer> BestOf(const Question& question) {
  const std::vector<Choice> choices = Choices(question);
  if (!AnyThatFits(question, choices)) return Remedied(question, choices.back(), Depth::kTime);
  const std::vector<Answer> answers = AnswersOf(question, choices);
  const Answer* const fastest = Fastest(answers);
  return fastest == nullptr ? std::nullopt : std::optional(*fastest);
}

// The change with the fastest answer, if that is faster than `from`.
std::optional<Change> FastestChange(const std::vector<Try>& tries, const Answer& from) {
  const std::vector<Answer> answers = AnswersOf(tries);
  std::optional<Change> best;
  for (size_t i = 0; i < answers.size(); ++i) {
    const double speed = Speed(answers[i]);
    if (speed > std::max(Speed(from) * kWorthIt, best ? best->tokens_per_second : 0))
      best = Change{.what = tries[i].change, .tokens_per_second = speed};
  }
  return best;
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

}  // namespace

std::vector<Choice> Choices(const Question& question) {
  const std::vector<Tier> tiers = TiersOf(question.machine);
  std::vector<Choice> choices;
  for (int stage = 0; stage <= 3; ++stage) {
    for (const Tier parameters : tiers) {
      if (stage < 3 && parameters != Tier::kDevice) continue;
      for (const Tier states : tiers) {
        if (stage == 0 && states != Tier::kDevice) continue;
        const Choice choice{.stage = stage, .parameters = parameters, .states = states};
        choices.push_back(choice);
        for (const Tier boundaries : {Tier::kDevice, Tier::kCpu}) {
          if (question.machine.is_cpu && boundaries == Tier::kCpu) continue;
          choices.push_back(choice);
          choices.back().boundaries = boundaries;
          choices.back().recompute = true;
        }
      }
    }
  }
  return choices;
}

std::vector<Answer> AnswerAll(const Question& question) {
  return AnswersOf(question, Choices(question));
}

const Answer* Fastest(std::span<const Answer> answers) {
  double most = 0;
  for (const Answer& answer : answers) most = std::max(most, Speed(answer));
  if (most == 0) return nullptr;
  return &*std::find_if(answers.begin(), answers.end(),
                        [&](const Answer& answer) { return Speed(answer) * kWorthIt >= most; });
}

std::optional<Change> BestChange(const Question& question, const Answer& from) {
  std::vector<Try> tries;
  Question asked = question;
  asked.config = from.config;
  // Given activations are those of one batch, with or without recomputing.
  const bool has_own_activations = question.pass.own_activations >= 0;
  for (const Choice& choice : Neighbours(from.choice, question.machine)) {
    if (has_own_activations && choice.recompute != from.choice.recompute) continue;
    tries.push_back(
        {.change = Described(from, choice, asked.With(choice)),
         .answer = [&asked, choice] { return AnswerFor(asked, choice, Depth::kTime); }});
  }
  const auto changed = [&](const std::function<void(Config&)>& change) {
    Config config = from.config;
    change(config);
    const bool is_same_batch =
        config.micro_batch_size == from.config.micro_batch_size &&
        config.gradient_accumulation_steps == from.config.gradient_accumulation_steps;
    tries.push_back(
        {.change = absl::StrCat(config::Difference(from.config, config),
                                is_same_batch ? "" : " (a larger batch, which trains differently)"),
         .answer = [&, config] {
           return AnswerFor(question, config, from.choice.recompute, Depth::kTime);
         }});
  };
  if (!has_own_activations)
    changed([](Config& config) {
      config.micro_batch_size = std::max<int64_t>(1, config.micro_batch_size) * 2;
      config.train_batch_size *= 2;
    });
  changed([](Config& config) {
    config.gradient_accumulation_steps =
        std::max<int64_t>(1, config.gradient_accumulation_steps) * 2;
    config.train_batch_size *= 2;
  });
  if (from.config.uses_nvme() && from.held[1] < from.room[1]) {
    // Free RAM holds a part of the state that is on NVMe.
    changed([&](Config& config) {
      config.ebb.host_memory = (from.room[1] - (from.room[1] - from.held[1]) / 8) >> 20 << 20;
    });
  }
  if (from.choice.states != Tier::kDevice)
    changed([](Config& config) { config.ebb.offload_gradients = Tier::kDevice; });
  if (from.choice.stage == 3) {
    changed([&](Config& config) {
      config.zero.prefetch_bucket_size = 2 * question.model.largest_unit();
      config.zero.max_live_parameters =
          std::max(config.zero.max_live_parameters, 4 * question.model.largest_unit());
    });
    changed([](Config& config) { config.ebb.reshard_after_forward = false; });
  }
  return FastestChange(tries, from);
}

std::optional<Change> BestPurchase(const Question& question, const Answer& from) {
  if (!from.time) return std::nullopt;
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
  std::vector<Try> tries;
  for (const Part& part : parts) {
    const auto is_critical = [&](Resource resource) {
      return from.time->simulated.critical.resources[static_cast<int>(resource)] > 0;
    };
    if (std::none_of(part.resources.begin(), part.resources.end(), is_critical)) continue;
    Machine richer = question.machine;
    for (double Machine::*const rate : part.rates) richer.*rate *= 2;
    tries.push_back({.change = absl::StrCat("twice ", part.name), .answer = [&, richer] {
                       Question with = question;
                       with.machine = richer;
                       return AnswerFor(with, from.config, from.choice.recompute, Depth::kTime);
                     }});
  }
  return FastestChange(tries, from);
}

double Offer::price_of(double tokens) const {
  constexpr double kHour = 3600;
  return hosts == 0 ? 0 : price_an_hour * hosts * tokens / Speed(*answer) / kHour;
}

void FillOffer(Question question, Offer& offer) {
  question.machine = offer.machine;
  const int most = offer.machine.network_gb_s > 0 ? kHostsMax : 1;
  double least = 0;  // hosts for a token a second
  for (int hosts = 1; hosts <= most; hosts *= 2) {
    if (offer.hosts > 0 && hosts > offer.hosts * kHostsAhead) return;
    question.ranks = static_cast<int>(offer.machine.gpus) * hosts;
    const std::optional<Answer> best = BestOf(question);
    if (!best) continue;
    const double of_token = hosts / Speed(*best);
    if (offer.hosts > 0 && of_token * kWorthIt >= least) continue;
    least = of_token;
    offer.hosts = hosts;
    offer.answer = best;
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

absl::StatusOr<Largest> FindLargest(const Question& question, Quantity quantity,
                                    const std::optional<Choice>& asked) {
  constexpr int64_t kMost[] = {kUnitsMax - 2, 1 << 20, 1 << 28};
  const int64_t most = kMost[static_cast<int>(quantity)];
  const std::vector<Choice> choices = asked ? std::vector{*asked} : Choices(question);
  Largest found{.question = question};
  // A context is searched in multiples of 64.
  const auto unit = [&] {
    return quantity == Quantity::kContext && found.most >= 1024 ? int64_t{64} : int64_t{1};
  };
  using Answering = std::function<Answer(const Question&)>;
  const auto fits = [&](int64_t number, const Answering& answering) -> absl::StatusOr<bool> {
    EBB_ASSIGN_OR_RETURN(Question changed, With(question, quantity, number));
    Answer answer = answering(changed);
    if (!answer.fits()) return false;
    found = {.most = number, .question = std::move(changed), .answer = std::move(answer)};
    return true;
  };
  // Looks for more than what is found.
  const auto search = [&](const Answering& answering) -> absl::Status {
    int64_t too_many = most + 1;
    for (int64_t number = std::max<int64_t>(1, 2 * found.most); number < too_many; number *= 2) {
      EBB_ASSIGN_OR_RETURN(const bool fitted, fits(number, answering));
      if (!fitted) too_many = number;
    }
    while (too_many - found.most > unit()) {
      const int64_t number = (found.most + (too_many - found.most) / 2) / unit() * unit();
      if (number <= found.most) break;
      EBB_ASSIGN_OR_RETURN(const bool fitted, fits(number, answering));
      if (!fitted) too_many = number;
    }
    return absl::OkStatus();
  };
  // One choice after the other, those that need least of the device's memory first. Most of the
  // others do not fit with one more, and are searched no further.
  for (auto choice = choices.rbegin(); choice != choices.rend(); ++choice) {
    const Answering answering = [&](const Question& of) {
      return AnswerFor(of, *choice, Depth::kMemory);
    };
    if (found.most + unit() > most) break;
    EBB_ASSIGN_OR_RETURN(const bool fitted, fits(found.most + unit(), answering));
    if (fitted) EBB_RETURN_IF_ERROR(search(answering));
  }
  // A remedy for one more is searched further with its keys, until there is no other.
  while (!asked && found.most + unit() <= most) {
    const int64_t more = found.most + unit();
    EBB_ASSIGN_OR_RETURN(Question changed, With(question, quantity, more));
    const std::optional<Answer> remedied = Remedied(changed, choices.back(), Depth::kMemory);
    if (!remedied) break;
    found = {.most = more, .question = std::move(changed), .answer = *remedied};
    EBB_RETURN_IF_ERROR(
        search([&](const Question& of) { return AnswerLike(of, *remedied, Depth::kMemory); }));
  }
  found.is_limit = found.most == most;
  if (found.most == 0) {
    EBB_ASSIGN_OR_RETURN(found.question, With(question, quantity, 1));
    found.answer = AnswerFor(found.question, choices.back(), Depth::kMemory);
    return found;
  }
  if (!found.answer.keys.empty()) {
    found.answer = AnswerLike(found.question, found.answer, Depth::kTime);
    return found;
  }
  // The fastest of all choices that fit with it.
  const std::vector<Answer> answers = AnswersOf(found.question, choices);
  if (const Answer* const best = Fastest(answers)) found.answer = *best;
  return found;
}

}  // namespace ebb::planner
