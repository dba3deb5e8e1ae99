#include "ebb/sharding/fit/advice_settings.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/config/difference.h"
#include "ebb/sharding/fit/advice.h"

namespace ebb::sharding {
namespace {

constexpr Tier kAllTiers[] = {Tier::kDevice, Tier::kCpu, Tier::kNvme};

// `cost`: by tier.
Setting Tiers(Tier now, const int (&cost)[kTiers], void (*put)(Config&, Tier)) {
  Setting setting;
  for (const Tier tier : kAllTiers) {
    if (tier == now) continue;
    setting.push_back({.make = [=](Config& c) { put(c, tier); },
                       .cost = cost[static_cast<int>(tier)] - cost[static_cast<int>(now)],
                       .saves = tier == Tier::kNvme});
  }
  return setting;
}

bool HasOneRound(const Config& config) {
  return config.gradient_accumulation_steps == config.ebb.micro_batches_per_round;
}

// Whether the gradients of a step are the same sums, bit for bit: the same number of micro-batches
// is added up, in the accumulation dtype, before they are reduced and added to the shard. Reduced
// once a step that is all of them, however many rounds they make. Nothing else that is changed here
// has a say.
bool SumsAlike(const Config& a, const Config& b) {
  const auto before_reducing = [](const Config& c) {
    return c.reduces_at_round() ? c.ebb.micro_batches_per_round : c.gradient_accumulation_steps;
  };
  return before_reducing(a) == before_reducing(b);
}

// Where the stage's default of reduce_at is another, and a step has several rounds, the value
// belongs to the change: the file may have left it out.
bool ShowsReduceAt(const Config& from, const Config& to) {
  return (from.zero.stage < 2) != (to.zero.stage < 2) && !HasOneRound(to);
}

// The stage, reduce_at and micro_batches_per_round. Together they decide the order of the sums of
// gradients (SumsAlike), so a change of one may be undone by another.
Setting StagesAndSums(const Config& config) {
  Setting setting;
  const int now = config.zero.stage;
  const int64_t per_round = config.ebb.micro_batches_per_round;
  const ReduceAt reduce_at = config.ebb.reduce_at;
  const auto add = [&](int stage, ReduceAt when, int64_t micro_batches) {
    const auto make = [=](Config& c) {
      c.zero.stage = stage;
      c.ebb.reduce_at = when;
      c.ebb.micro_batches_per_round = micro_batches;
    };
    Config changed = config;
    make(changed);
    const bool other = when != reduce_at, fewer = micro_batches != per_round;
    setting.push_back({.make = make,
                       .keys = (stage != now) + (other || ShowsReduceAt(config, changed)) + fewer,
                       .cost = 2 * (stage == 3) - 2 * (now == 3) + 3 * other + 4 * fewer,
                       .changes_numbers = !SumsAlike(config, changed),
                       .saves = stage == 3 && (reduce_at == ReduceAt::kStep || when == reduce_at)});
  };
  std::vector<int> stages = {now};
  if (now == 0) stages.push_back(1);
  stages.push_back(now == 3 ? 2 : 3);
  for (const int stage : stages) {
    if (stage != now) add(stage, reduce_at, per_round);
    if (per_round > 1) add(stage, reduce_at, 1);
    if (config.reduces_at_round()) {
      // One round becomes several, with the same sums.
      if (per_round > 1 && HasOneRound(config)) add(stage, ReduceAt::kStep, 1);
    } else if (config.gradient_accumulation_steps > 1) {
      if (!HasOneRound(config)) add(stage, ReduceAt::kRound, per_round);
      if (per_round > 1) add(stage, ReduceAt::kRound, 1);
    }
  }
  return setting;
}

Setting ParameterTiers(const Config& config) {
  constexpr int kCost[kTiers] = {0, 8, 24};
  const OffloadParamConfig& now = config.zero.offload_param;
  Setting setting = Tiers(now.device, kCost, [](Config& c, Tier tier) {
    c.zero.offload_param.device = tier;
    if (tier == Tier::kNvme) c.zero.offload_param.max_in_cpu = 0;
  });
  if (now.max_in_cpu == 0) return setting;
  if (now.device != Tier::kNvme) {
    setting.back().keys = 2;  // kNvme
  } else {
    setting.push_back({.make = [](Config& c) { c.zero.offload_param.max_in_cpu = 0; }, .cost = 16});
  }
  return setting;
}

Setting GradientTiers(const Config& config) {
  constexpr int kCost[kTiers] = {0, 8, 40};
  const auto put = [](Config& c, Tier tier) { c.ebb.offload_gradients = tier; };
  Setting setting = Tiers(config.gradient_tier(), kCost, put);
  // Gradients that follow the optimizer may stay where they are when it moves.
  if (!config.ebb.offload_gradients) {
    const Tier now = config.gradient_tier();
    setting.push_back({.make = [=](Config& c) { put(c, now); }, .saves = false});
  }
  return setting;
}

// A setting with one change, made alike in every config; without any where it is not possible.
Setting One(bool possible, std::function<void(Config&)> make, int cost,
            bool changes_numbers = false) {
  if (!possible) return {};
  return {{.make = std::move(make), .cost = cost, .changes_numbers = changes_numbers}};
}

}  // namespace

std::vector<Setting> SettingsOf(const Config& config, const Table& table,
                                bool sums_depend_on_groups) {
  constexpr int kOptimizerCost[kTiers] = {0, 6, 102}, kActivationCost[kTiers] = {0, 7, 28};
  const ZeroConfig& zero = config.zero;
  const EbbConfig& ebb = config.ebb;
  const bool has_boundaries = config.activation_tier() != Tier::kDevice || HasBoundaries(table);
  const int64_t sub_group = SmallSubGroup(table);
  return {
      StagesAndSums(config),
      Tiers(zero.offload_optimizer.device, kOptimizerCost,
            [](Config& c, Tier tier) { c.zero.offload_optimizer.device = tier; }),
      One(
          zero.offload_optimizer.ratio != 1,
          [](Config& c) {
            c.zero.offload_optimizer.ratio = 1;
            // The number itself, not what "auto" made of it.
            c.zero.offload_optimizer.measures_ratio = false;
          },
          1),
      ParameterTiers(config),
      GradientTiers(config),
      has_boundaries ? Tiers(config.activation_tier(), kActivationCost,
                             [](Config& c, Tier tier) { c.ebb.offload_activations = tier; })
                     : Setting{},
      One(
          zero.param_persistence_threshold > 0,
          [](Config& c) { c.zero.param_persistence_threshold = 0; }, 9),
      One(
          zero.hpz_partition_size > 1, [](Config& c) { c.zero.hpz_partition_size = 1; }, 2),
      One(
          ebb.prefetch_depth > 0, [](Config& c) { c.ebb.prefetch_depth = 0; }, 10),
      One(
          ebb.coalesce_bytes != 0,
          [](Config& c) {
            c.ebb.coalesce_bytes = 0;
            c.ebb.measures_coalesce = false;
          },
          11, sums_depend_on_groups),
      One(
          config.compute == DType::kBFloat16 && !ebb.split_master && !ebb.stochastic_rounding,
          [](Config& c) { c.ebb.split_master = true; }, 12),
      One(
          zero.sub_group_size > sub_group, [=](Config& c) { c.zero.sub_group_size = sub_group; },
          13),
  };
}

bool MakesSense(const Config& given, const Config& c) {
  const ZeroConfig& zero = c.zero;
  const bool has_optimizer = zero.offload_optimizer.device != Tier::kDevice;
  const bool has_parameters = zero.offload_param.device != Tier::kDevice;
  const bool has_gradients = c.gradient_tier() != Tier::kDevice;
  if (zero.stage < 3 && has_parameters) return false;
  if (zero.stage == 0 && (has_optimizer || has_gradients)) return false;
  if (zero.stage < 3 &&
      (zero.param_persistence_threshold != given.zero.param_persistence_threshold ||
       zero.hpz_partition_size != given.zero.hpz_partition_size ||
       c.ebb.prefetch_depth != given.ebb.prefetch_depth))
    return false;
  if (!has_optimizer && zero.offload_optimizer.ratio != given.zero.offload_optimizer.ratio)
    return false;
  if (c.ebb.offload_gradients && !given.ebb.offload_gradients &&
      zero.offload_optimizer.ratio == 1) {
    const Tier follows = has_optimizer ? Tier::kCpu : Tier::kDevice;
    if (*c.ebb.offload_gradients == follows) return false;
  }
  return has_optimizer || has_parameters || has_gradients ||
         zero.sub_group_size == given.zero.sub_group_size;
}

void GiveFolders(Config& c) {
  std::vector<std::string>& parameters = c.zero.offload_param.nvme_paths;
  std::vector<std::string>& others = c.zero.offload_optimizer.nvme_paths;
  const std::vector<std::string> asked = {"FOLDER"};
  if (c.parameter_tier() == Tier::kNvme && parameters.empty())
    parameters = others.empty() ? asked : others;
  if (c.optimizer_tier() == Tier::kNvme && others.empty())
    others = parameters.empty() ? asked : parameters;
  if (c.uses_nvme() && parameters.empty() && others.empty()) others = asked;
}

std::string Described(Config from, const Config& to) {
  if (ShowsReduceAt(from, to)) from.ebb.reduce_at = ReduceAt::kDefault;
  if (from.optimizer_tier() != Tier::kNvme && to.optimizer_tier() == Tier::kNvme)
    from.zero.offload_optimizer.nvme_paths.clear();
  return config::Difference(from, to);
}

}  // namespace ebb::sharding
