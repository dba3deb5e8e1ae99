#include "ebb/sharding/advice.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/difference.h"
#include "ebb/sharding/budget.h"
#include "ebb/sharding/homes.h"

namespace ebb::sharding {
namespace {

// One value of a setting beside the one that is given.
struct Choice {
  std::function<void(Config&)> make;
  int keys = 1;
  // What a step pays: roughly the bytes that it moves more of each parameter, those of the disk four
  // times, and as much where it moves no more, but waits longer. Only an order: nothing is predicted.
  int cost = 0;
};
using Setting = std::vector<Choice>;

constexpr Tier kAllTiers[] = {Tier::kDevice, Tier::kCpu, Tier::kNvme};

// `cost`: of each tier.
Setting Tiers(Tier now, const int (&cost)[kTiers], void (*put)(Config&, Tier)) {
  Setting setting;
  for (const Tier tier : kAllTiers) {
    if (tier == now) continue;
    setting.push_back({.make = [=](Config& c) { put(c, tier); },
                       .cost = cost[static_cast<int>(tier)] - cost[static_cast<int>(now)]});
  }
  return setting;
}

// Where the stage's default of reduce_at is another, the value belongs to the change: the file may
// have left it out.
bool ShowsReduceAt(const Config& config, int stage) {
  return (config.zero.stage < 2) != (stage < 2) && config.gradient_accumulation_steps > 1;
}

Setting Stages(const Config& config) {
  Setting setting;
  const int now = config.zero.stage;
  const auto add = [&](int stage, ReduceAt reduce_at) {
    const bool other = reduce_at != config.ebb.reduce_at;
    setting.push_back({.make =
                           [=](Config& c) {
                             c.zero.stage = stage;
                             c.ebb.reduce_at = reduce_at;
                           },
                       .keys = (stage != now) + (other || ShowsReduceAt(config, stage)),
                       .cost = 2 * (stage == 3) - 2 * (now == 3) + 3 * other});
  };
  std::vector<int> stages = {now};
  if (now == 0) stages.push_back(1);
  stages.push_back(now == 3 ? 2 : 3);
  for (const int stage : stages) {
    if (stage != now) add(stage, config.ebb.reduce_at);
    if (!config.reduces_at_round() && config.gradient_accumulation_steps > 1)
      add(stage, ReduceAt::kRound);
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
    setting.back().keys = 2;
  } else {
    setting.push_back({.make = [](Config& c) { c.zero.offload_param.max_in_cpu = 0; }, .cost = 16});
  }
  return setting;
}

Setting GradientTiers(const Config& config) {
  constexpr int kCost[kTiers] = {0, 8, 40};
  const auto put = [](Config& c, Tier tier) { c.ebb.offload_gradients = tier; };
  Setting setting = Tiers(config.gradient_tier(), kCost, put);
  // What follows the optimizer may stay where it is when that moves.
  if (!config.ebb.offload_gradients) {
    const Tier now = config.gradient_tier();
    setting.push_back({.make = [=](Config& c) { put(c, now); }});
  }
  return setting;
}

// What is the same for every config that it is possible for.
Setting One(bool possible, std::function<void(Config&)> make, int cost) {
  return possible ? Setting{{.make = std::move(make), .cost = cost}} : Setting{};
}

std::vector<Setting> SettingsOf(const Config& config, const Pools& pools) {
  constexpr int kOptimizerCost[kTiers] = {0, 6, 102}, kActivationCost[kTiers] = {0, 7, 28};
  const ZeroConfig& zero = config.zero;
  const EbbConfig& ebb = config.ebb;
  const bool has_boundaries =
      config.activation_tier() != Tier::kDevice ||
      std::any_of(pools.visits.begin(), pools.visits.end(),
                  [](const VisitAddresses& visit) { return visit.boundary_stride > 0; });
  const int64_t sub_group = SmallSubGroup(pools);
  return {
      Stages(config),
      Tiers(zero.offload_optimizer.device, kOptimizerCost,
            [](Config& c, Tier tier) { c.zero.offload_optimizer.device = tier; }),
      One(
          zero.offload_optimizer.ratio != 1,
          [](Config& c) {
            c.zero.offload_optimizer.ratio = 1;
            // That number, and not what "auto" made of it.
            c.zero.offload_optimizer.measures_ratio = false;
          },
          1),
      ParameterTiers(config),
      GradientTiers(config),
      has_boundaries ? Tiers(config.activation_tier(), kActivationCost,
                             [](Config& c, Tier tier) { c.ebb.offload_activations = tier; })
                     : Setting{},
      One(
          ebb.micro_batches_per_round > 1, [](Config& c) { c.ebb.micro_batches_per_round = 1; }, 4),
      One(
          zero.param_persistence_threshold > 0,
          [](Config& c) { c.zero.param_persistence_threshold = 0; }, 9),
      One(
          ebb.prefetch_depth > 0, [](Config& c) { c.ebb.prefetch_depth = 0; }, 10),
      One(
          ebb.coalesce_bytes != 0,
          [](Config& c) {
            c.ebb.coalesce_bytes = 0;
            c.ebb.measures_coalesce = false;
          },
          11),
      One(
          config.compute == DType::kBFloat16 && !ebb.split_master && !ebb.stochastic_rounding,
          [](Config& c) { c.ebb.split_master = true; }, 12),
      One(
          zero.sub_group_size > sub_group, [=](Config& c) { c.zero.sub_group_size = sub_group; },
          13),
  };
}

// Whether `c` is allowed, and does not have a key that means nothing beside the others.
bool MakesSense(const Config& given, const Config& c) {
  const ZeroConfig& zero = c.zero;
  const bool has_optimizer = zero.offload_optimizer.device != Tier::kDevice;
  const bool has_parameters = zero.offload_param.device != Tier::kDevice;
  const bool has_gradients = c.gradient_tier() != Tier::kDevice;
  if (zero.stage < 3 && has_parameters) return false;
  if (zero.stage == 0 && (has_optimizer || has_gradients)) return false;
  if (zero.stage < 3 &&
      (zero.param_persistence_threshold != given.zero.param_persistence_threshold ||
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

// The folder of the other tensors; the name is the user's to give where there is none.
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

// What resolving the file may have filled in, and would fill in otherwise for `to`, is told as well.
std::string Told(Config from, const Config& to) {
  if (ShowsReduceAt(from, to.zero.stage)) from.ebb.reduce_at = ReduceAt::kDefault;
  if (from.optimizer_tier() != Tier::kNvme && to.optimizer_tier() == Tier::kNvme)
    from.zero.offload_optimizer.nvme_paths.clear();
  return config::Difference(from, to);
}

class Search {
 public:
  Search(const Config& config, const MemoryCaps& caps,
         absl::FunctionRef<absl::StatusOr<Pools>(const Config& changed)> lay_out)
      : config_(config), start_(config), caps_(caps), lay_out_(lay_out) {}

  std::string Run() {
    absl::StatusOr<Pools> pools = lay_out_(start_);
    if (!pools.ok()) return std::string(Relief());
    now_ = NeedOf(*pools);
    // Of more than there is the config asks to have it filled.
    if (const int64_t room = HostRoom();
        !caps_.of_config && room > 0 && room < start_.ebb.host_memory.value_or(0)) {
      start_.ebb.host_memory = room;
      const std::optional<Need> lower = TryOf(start_);
      if (lower && lower->over == 0) return Fits(start_);
      start_.ebb.host_memory.reset();  // what must be there, and no states that need not
      pools = lay_out_(start_);
      if (!pools.ok()) return std::string(Relief());
      now_ = NeedOf(*pools);
      if (now_.over == 0) return Fits(start_);
    }
    settings_ = SettingsOf(start_, *pools);
    units_ = std::max<int64_t>(1, static_cast<int64_t>(pools->units.size()));
    return Tell();
  }

 private:
  struct Need {
    int64_t device = 0, host = 0;  // bytes
    int64_t over = 0;              // of them, beyond the caps
  };
  struct Candidate {
    uint64_t choices = 0;  // a digit of kChoices for each setting; 0: as given
    int keys = 0, cost = 0;
  };
  static constexpr uint64_t kChoices = 8;

  std::string Tell() {
    Need least = now_;
    Config with_least = start_;
    std::optional<Config> growing;
    int64_t trials = std::max(kAdviceTrialsMin, kAdviceUnitTrialsMax / units_);
    for (const Candidate& candidate : Candidates()) {
      if (trials == 0) break;
      const Config changed = With(candidate);
      if (!MakesSense(start_, changed)) continue;
      --trials;
      const std::optional<Need> need = TryOf(changed);
      if (!need) continue;
      if (need->over == 0 && Grows(*need)) {
        if (!growing) growing = changed;
      } else if (need->over < least.over) {
        if (need->over == 0) return Fits(changed);
        least = *need;
        with_least = changed;
      }
    }
    if (trials == 0) TryAllTogether(least, with_least);
    if (least.over == 0) return Fits(with_least);
    if (growing) return Fits(*growing);
    const std::string wanted = absl::StrCat(
        std::string(Relief()), ", or take smaller units, a smaller micro-batch or more ",
        caps_.of_config ? "ranks" : "hosts");
    if (with_least == start_) return absl::StrCat("no other setting needs less: ", wanted);
    return absl::StrCat("no setting fits; the least, ", Shown(least), ", is with ",
                        Told(config_, Capped(with_least, least)), ": ", wanted);
  }

  // The last choice of every setting, without those that can be left alone.
  void TryAllTogether(Need& least, Config& with_least) const {
    Candidate all;
    std::vector<uint64_t> digits;
    uint64_t place = 1;
    for (const Setting& setting : settings_) {
      digits.push_back(place * setting.size());
      all.choices += digits.back();
      place *= kChoices;
    }
    const auto keep = [&](const Candidate& candidate) {
      const Config changed = With(candidate);
      if (!MakesSense(start_, changed)) return false;
      const std::optional<Need> need = TryOf(changed);
      if (!need || need->over > least.over || (need->over == 0 && Grows(*need))) return false;
      least = *need;
      with_least = changed;
      return true;
    };
    if (!keep(all)) return;
    for (const uint64_t digit : digits) {
      Candidate fewer = all;
      fewer.choices -= digit;
      if (digit > 0 && keep(fewer)) all = fewer;
    }
  }

  // All combinations, the smallest change first.
  std::vector<Candidate> Candidates() const {
    std::vector<Candidate> candidates = {{}};
    uint64_t digit = 1;
    for (const Setting& setting : settings_) {
      const size_t before = candidates.size();
      for (size_t i = 0; i < setting.size(); ++i) {
        for (size_t c = 0; c < before; ++c) {
          candidates.push_back({.choices = candidates[c].choices + digit * (i + 1),
                                .keys = candidates[c].keys + setting[i].keys,
                                .cost = candidates[c].cost + setting[i].cost});
        }
      }
      digit *= kChoices;
    }
    candidates.erase(candidates.begin());
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) {
                       return std::pair(a.keys, a.cost) < std::pair(b.keys, b.cost);
                     });
    return candidates;
  }

  Config With(const Candidate& candidate) const {
    Config changed = start_;
    uint64_t choices = candidate.choices;
    for (const Setting& setting : settings_) {
      if (const uint64_t choice = choices % kChoices; choice > 0) setting[choice - 1].make(changed);
      choices /= kChoices;
    }
    GiveFolders(changed);
    return changed;
  }

  Need NeedOf(const Pools& pools) const {
    const auto over = [](int64_t bytes, std::optional<int64_t> cap) {
      return cap ? std::max<int64_t>(0, bytes - *cap) : 0;
    };
    Need need{.device = DeviceBytes(pools), .host = HostBytes(pools)};
    need.over = std::max(over(need.device, caps_.device) + over(need.host, caps_.host),
                         over(need.device + need.host, caps_.together));
    return need;
  }
  std::optional<Need> TryOf(const Config& changed) const {
    const absl::StatusOr<Pools> pools = lay_out_(changed);
    if (!pools.ok()) return std::nullopt;
    return NeedOf(*pools);
  }

  // What the device has room for is not known then: such a change is the last to be told.
  bool Grows(const Need& need) const {
    return !caps_.device && !caps_.together && need.device > now_.device;
  }

  // Of the caps, for pools in host memory beside those on the device, in whole MiB.
  int64_t HostRoom() const {
    int64_t room = caps_.host.value_or(INT64_MAX);
    if (caps_.together) room = std::min(room, std::max<int64_t>(0, *caps_.together - now_.device));
    return room >> 20 << 20;
  }
  // A cap that the search has left out is one again, of what is needed.
  Config Capped(Config changed, const Need& need) const {
    if (config_.ebb.host_memory && !changed.ebb.host_memory)
      changed.ebb.host_memory = std::max<int64_t>(need.host, 1);
    return changed;
  }
  std::string_view Relief() const { return caps_.of_config ? "raise it" : "free memory"; }

  std::string Shown(const Need& need) const {
    return absl::StrCat(Megabytes(need.device), " on the device and ", Megabytes(need.host),
                        " in host memory");
  }
  // With what it lowers no lower than it must.
  std::string Fits(Config changed) const {
    Loosen(changed, [](Config& c) -> int64_t& { return c.ebb.micro_batches_per_round; });
    Loosen(changed, [](Config& c) -> int64_t& { return c.ebb.prefetch_depth; });
    Loosen(changed, [](Config& c) -> int64_t& { return c.zero.sub_group_size; });
    const Need need = *TryOf(changed);
    return absl::StrCat(Told(config_, Capped(changed, need)), " would fit",
                        Grows(need) ? " if the device has room for it" : "", " (", Shown(need),
                        "), or ", std::string(Relief()));
  }
  void Loosen(Config& changed, int64_t& (*number)(Config&)) const {
    Config given = start_;
    Config looser = changed;
    while (number(changed) < number(given) / 2) {
      number(looser) = std::max<int64_t>(1, 2 * number(changed));
      if (looser.gradient_accumulation_steps % looser.ebb.micro_batches_per_round != 0) return;
      const std::optional<Need> need = TryOf(looser);
      if (!need || need->over > 0 || (Grows(*need) && !Grows(*TryOf(changed)))) return;
      changed = looser;
    }
  }

  const Config& config_;
  Config start_;  // which changes are made to
  const MemoryCaps& caps_;
  absl::FunctionRef<absl::StatusOr<Pools>(const Config& changed)> lay_out_;
  Need now_;
  int64_t units_ = 1;
  std::vector<Setting> settings_;
};

}  // namespace

int64_t SmallSubGroup(const Pools& pools) {
  constexpr int64_t kSubGroups = 256;
  int64_t elements = 0;
  for (const SubGroup& group : pools.homes.sub_groups) elements += group.count();
  const int64_t cuts = std::max<int64_t>(1, elements / kSubGroups / kCutElements);
  return std::min(cuts * kCutElements, kSubGroupElementsMin);
}

MemoryCaps CapsOf(const Config& config) {
  return {.device = config.ebb.device_memory, .host = config.ebb.host_memory};
}

std::string FindAdvice(const Config& config, const MemoryCaps& caps,
                       absl::FunctionRef<absl::StatusOr<Pools>(const Config& changed)> lay_out) {
  return Search(config, caps, lay_out).Run();
}

}  // namespace ebb::sharding
