#include "ebb/runtime/planner/search.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/difference.h"

namespace ebb::planner {
namespace {

using sharding::Resource;

// A change must make the step faster by more than this factor.
constexpr double kWorthIt = 1.005;

double Speed(const Answer& answer) {
  return answer.fits() && answer.time ? answer.time->tokens_per_second : 0;
}

int Differences(const Choice& a, const Choice& b) {
  return (a.stage != b.stage) + (a.parameters != b.parameters) + (a.states != b.states) +
         (a.boundaries != b.boundaries) + (a.recompute != b.recompute);
}

// The difference of two choices, in the keys of a configuration file.
std::string Described(const Choice& from, const Choice& to) {
  if (from.recompute != to.recompute)
    return to.recompute ? "recomputing blocks in backward" : "keeping activations, not recomputing";
  if (from.stage != to.stage) return absl::StrCat("\"stage\": ", to.stage);
  const auto offload = [](const char* key, Tier tier) {
    const std::string_view name = tier == Tier::kDevice ? "none" : Name(tier);
    return absl::StrCat("\"", key, "\": {\"device\": \"",
                        absl::string_view(name.data(), name.size()), "\"}");
  };
  if (from.parameters != to.parameters) return offload("offload_param", to.parameters);
  if (from.states != to.states) return offload("offload_optimizer", to.states);
  return absl::StrCat("\"offload_activations\": \"", std::string(Name(to.boundaries)), "\"");
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

std::vector<Answer> AnswersOf(const Question& question, std::span<const Choice> choices) {
  std::vector<Answer> answers;
  for (const Choice& choice : choices) answers.push_back(AnswerFor(question, choice, Depth::kTime));
  return answers;
}

}  // namespace

std::vector<Choice> Choices(const Question& question) {
  std::vector<Tier> tiers = {Tier::kDevice, Tier::kCpu, Tier::kNvme};
  if (question.machine.disk <= 0) tiers.pop_back();
  if (question.machine.is_cpu) tiers.erase(tiers.begin() + 1);  // its RAM is the device's memory
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

std::optional<Change> BestChange(const Question& question, std::span<const Answer> answers,
                                 const Answer& from) {
  std::optional<Change> best;
  const auto consider = [&](std::string what, const Answer& answer) {
    if (Speed(answer) <= std::max(Speed(from) * kWorthIt, best ? best->tokens_per_second : 0))
      return;
    best = Change{.what = std::move(what), .tokens_per_second = Speed(answer)};
  };
  // Given activations are those of one batch, with or without recomputing.
  const bool has_own_activations = question.pass.own_activations >= 0;
  for (const Answer& answer : answers) {
    if (has_own_activations && answer.choice.recompute != from.choice.recompute) continue;
    if (Differences(answer.choice, from.choice) == 1)
      consider(Described(from.choice, answer.choice), answer);
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
  constexpr int kHostsMax = 1024;
  question.machine = offer.machine;
  const int most = offer.machine.network_gb_s > 0 ? kHostsMax : 1;
  for (int hosts = 1; hosts <= most; hosts *= 2) {
    question.ranks = static_cast<int>(offer.machine.gpus) * hosts;
    // The choice that needs least memory is tried alone until it fits.
    if (!AnyThatFits(question, Choices(question))) continue;
    const std::vector<Answer> answers = AnswerAll(question);
    const Answer* const fastest = Fastest(answers);
    if (fastest == nullptr) continue;
    offer.hosts = hosts;
    offer.answer = *fastest;
    return;
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
  const std::vector<Choice> choices = asked ? std::vector{*asked} : Choices(question);
  Largest found{.question = question};
  int64_t too_many = kMost[static_cast<int>(quantity)] + 1;
  const auto fits = [&](int64_t number) -> absl::StatusOr<bool> {
    absl::StatusOr<Question> changed = With(question, quantity, number);
    if (!changed.ok()) return changed.status();
    std::optional<Answer> answer = AnyThatFits(*changed, choices);
    if (!answer) return false;
    found = {.most = number, .question = *std::move(changed), .answer = *std::move(answer)};
    return true;
  };
  for (int64_t number = 1; number < too_many; number *= 2) {
    const absl::StatusOr<bool> fitted = fits(number);
    if (!fitted.ok()) return fitted.status();
    if (!*fitted) too_many = number;
  }
  // A context is searched in multiples of 64.
  const int64_t unit = quantity == Quantity::kContext && found.most >= 1024 ? 64 : 1;
  while (too_many - found.most > unit) {
    const int64_t number = (found.most + (too_many - found.most) / 2) / unit * unit;
    if (number <= found.most) break;
    const absl::StatusOr<bool> fitted = fits(number);
    if (!fitted.ok()) return fitted.status();
    if (!*fitted) too_many = number;
  }
  if (found.most > 0) {
    // The fastest of all choices that fit with it.
    const std::vector<Answer> answers = AnswersOf(found.question, choices);
    if (const Answer* const best = Fastest(answers)) found.answer = *best;
  }
  return found;
}

}  // namespace ebb::planner
