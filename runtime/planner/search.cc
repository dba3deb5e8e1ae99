#include "ebb/runtime/planner/search.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/difference.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::planner {
namespace {

using sharding::Resource;

// A change must make the step faster by more than this factor.
constexpr double kWorthIt = 1.005;

double Speed(const Answer& answer) {
  return answer.fits() && answer.time ? answer.time->tokens_per_second : 0;
}

// The difference of two choices, as JSON to merge into a configuration file.
std::string Described(const Choice& from, const Choice& to) {
  if (from.recompute != to.recompute)
    return to.recompute ? "recomputing blocks in backward" : "keeping activations, not recomputing";
  if (from.boundaries != to.boundaries)
    return absl::StrCat("{\"ebb\": {\"offload_activations\": \"", std::string(Name(to.boundaries)),
                        "\"}}");
  const auto of_zero = [](auto... text) {
    return absl::StrCat("{\"zero_optimization\": {\"", text..., "}}");
  };
  if (from.stage != to.stage) return of_zero("stage\": ", to.stage);
  const auto offload = [&](const char* key, Tier tier) {
    const std::string_view name = tier == Tier::kDevice ? "none" : Name(tier);
    return of_zero(key, "\": {\"device\": \"", absl::string_view(name.data(), name.size()), "\"}");
  };
  if (from.parameters != to.parameters) return offload("offload_param", to.parameters);
  return offload("offload_optimizer", to.states);
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

std::vector<Answer> AnswersOf(const Question& question, std::span<const Choice> choices) {
  std::vector<Answer> answers;
  for (const Choice& choice : choices) answers.push_back(AnswerFor(question, choice, Depth::kTime));
  return answers;
}

// The fastest of all choices that fit, or what a remedy makes of the smallest.
std::optional<Answer> BestOf(const Question& question) {
  const std::vector<Choice> choices = Choices(question);
  if (!AnyThatFits(question, choices)) return Remedied(question, choices.back(), Depth::kTime);
  const std::vector<Answer> answers = AnswersOf(question, choices);
  const Answer* const fastest = Fastest(answers);
  return fastest == nullptr ? std::nullopt : std::optional(*fastest);
}

// The same settings for another model, context or batch.
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
  std::optional<Change> best;
  const auto consider = [&](std::string what, const Answer& answer) {
    if (Speed(answer) <= std::max(Speed(from) * kWorthIt, best ? best->tokens_per_second : 0))
      return;
    best = Change{.what = std::move(what), .tokens_per_second = Speed(answer)};
  };
  Question asked = question;
  asked.config = from.config;
  // Given activations are those of one batch, with or without recomputing.
  const bool has_own_activations = question.pass.own_activations >= 0;
  for (const Choice& choice : Neighbours(from.choice, question.machine)) {
    if (has_own_activations && choice.recompute != from.choice.recompute) continue;
    consider(Described(from.choice, choice), AnswerFor(asked, choice, Depth::kTime));
  }
  const auto changed = [&](void (*change)(Config&, const Model&)) {
    Config config = from.config;
    change(config, question.model);
    const Answer answer = AnswerFor(question, config, from.choice.recompute, Depth::kTime);
    const bool is_same_batch =
        config.micro_batch_size == from.config.micro_batch_size &&
        config.gradient_accumulation_steps == from.config.gradient_accumulation_steps;
    consider(absl::StrCat(config::Difference(from.config, config),
                          is_same_batch ? "" : " (a larger batch, which trains differently)"),
             answer);
  };
  if (!has_own_activations)
    changed([](Config& config, const Model&) {
      config.micro_batch_size = std::max<int64_t>(1, config.micro_batch_size) * 2;
      config.train_batch_size = 0;
    });
  changed([](Config& config, const Model&) {
    config.gradient_accumulation_steps =
        std::max<int64_t>(1, config.gradient_accumulation_steps) * 2;
    config.train_batch_size = 0;
  });
  if (from.config.uses_nvme() && from.held[1] < from.room[1]) {
    // Free RAM holds a part of the state that is on NVMe.
    Config config = from.config;
    config.ebb.host_memory = (from.room[1] - (from.room[1] - from.held[1]) / 8) >> 20 << 20;
    consider(config::Difference(from.config, config),
             AnswerFor(question, config, from.choice.recompute, Depth::kTime));
  }
  if (from.choice.stage == 3) {
    changed([](Config& config, const Model& model) {
      config.zero.prefetch_bucket_size = 2 * model.largest_unit();
      config.zero.max_live_parameters =
          std::max(config.zero.max_live_parameters, 4 * model.largest_unit());
    });
    changed([](Config& config, const Model&) { config.ebb.reshard_after_forward = false; });
  }
  return best;
}

std::optional<Change> BestPurchase(const Question& question, const Answer& from) {
  if (!from.time) return std::nullopt;
  struct Part {
    Resource resource;
    const char* name;
    double Machine::*rate;
  };
  constexpr Part kParts[] = {
      {Resource::kDevice, "the GPUs' arithmetic", &Machine::gpu_teraflops},
      {Resource::kDeviceMemory, "the GPUs' bandwidth", &Machine::gpu_memory_gb_s},
      {Resource::kCores, "the cores", &Machine::cores},
      {Resource::kHostMemory, "the RAM's bandwidth", &Machine::ram_gb_s},
      {Resource::kToDevice, "PCIe's bandwidth", &Machine::pcie_gb_s},
      {Resource::kToHost, "PCIe's bandwidth", &Machine::pcie_gb_s},
      {Resource::kPeers, "the GPUs' links", &Machine::link_gb_s},
      {Resource::kNetwork, "the network", &Machine::network_gb_s},
      {Resource::kDiskRead, "the disks' reads", &Machine::disk_read_gb_s},
      {Resource::kDiskWrite, "the disks' writes", &Machine::disk_write_gb_s}};
  std::optional<Change> best;
  for (const Part& part : kParts) {
    if (from.time->simulated.critical.resources[static_cast<size_t>(part.resource)] <= 0) continue;
    Question richer = question;
    richer.machine.*part.rate *= 2;
    if (part.resource == Resource::kDiskRead || part.resource == Resource::kDiskWrite)
      richer.machine.disk_both_gb_s = 0;
    const Answer answer = AnswerFor(richer, from.config, from.choice.recompute, Depth::kTime);
    if (Speed(answer) <= (best ? best->tokens_per_second : Speed(from) * kWorthIt)) continue;
    best = Change{.what = absl::StrCat("twice ", part.name), .tokens_per_second = Speed(answer)};
  }
  return best;
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
  std::optional<Answer> remedied;  // of a size at which no choice fits
  const auto fits = [&](int64_t number) -> absl::StatusOr<bool> {
    EBB_ASSIGN_OR_RETURN(Question changed, With(question, quantity, number));
    std::optional<Answer> answer =
        remedied ? AnswerLike(changed, *remedied, Depth::kMemory) : AnyThatFits(changed, choices);
    if (!answer || !answer->fits()) return false;
    found = {.most = number, .question = std::move(changed), .answer = *std::move(answer)};
    return true;
  };
  // A context is searched in multiples of 64.
  const auto unit = [&] {
    return quantity == Quantity::kContext && found.most >= 1024 ? int64_t{64} : int64_t{1};
  };
  const auto search = [&]() -> absl::Status {
    int64_t too_many = most + 1;
    for (int64_t number = std::max<int64_t>(1, 2 * found.most); number < too_many; number *= 2) {
      EBB_ASSIGN_OR_RETURN(const bool fitted, fits(number));
      if (!fitted) too_many = number;
    }
    while (too_many - found.most > unit()) {
      const int64_t number = (found.most + (too_many - found.most) / 2) / unit() * unit();
      if (number <= found.most) break;
      EBB_ASSIGN_OR_RETURN(const bool fitted, fits(number));
      if (!fitted) too_many = number;
    }
    return absl::OkStatus();
  };
  EBB_RETURN_IF_ERROR(search());
  // A remedy for one more is searched further with its keys, until there is no other.
  while (!asked && found.most + unit() <= most) {
    const int64_t more = found.most + unit();
    EBB_ASSIGN_OR_RETURN(Question changed, With(question, quantity, more));
    remedied = Remedied(changed, choices.back(), Depth::kMemory);
    if (!remedied) break;
    found = {.most = more, .question = std::move(changed), .answer = *remedied};
    EBB_RETURN_IF_ERROR(search());
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
