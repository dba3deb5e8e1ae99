#include "ebb/sharding/advice.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/difference.h"
#include "ebb/sharding/budget.h"
#include "ebb/sharding/homes.h"

namespace ebb::sharding {
namespace {

// Each leaves a config alone that has nothing to gain by it.
using Change = void (*)(Config&);

// The folder of the other tensors; the name is the user's to give where there is none.
void GiveFolders(std::vector<std::string>& paths, const std::vector<std::string>& others) {
  if (!paths.empty()) return;
  paths = others.empty() ? std::vector<std::string>{"FOLDER"} : others;
}
void OptimizerTo(Config& c, Tier tier) {
  c.zero.stage = std::max(c.zero.stage, 1);
  c.zero.offload_optimizer.device = tier;
  if (tier == Tier::kNvme)
    GiveFolders(c.zero.offload_optimizer.nvme_paths, c.zero.offload_param.nvme_paths);
}
void ParametersTo(Config& c, Tier tier) {
  c.zero.stage = 3;
  c.zero.offload_param.device = tier;
  if (tier != Tier::kNvme) return;
  GiveFolders(c.zero.offload_param.nvme_paths, c.zero.offload_optimizer.nvme_paths);
  c.zero.offload_param.max_in_cpu = 0;
}
void GradientsTo(Config& c, Tier tier) {
  c.zero.stage = std::max(c.zero.stage, 1);
  c.ebb.offload_gradients = tier;
}
void NeedFolders(Config& c) {
  if (c.zero.offload_param.nvme_paths.empty()) GiveFolders(c.zero.offload_optimizer.nvme_paths, {});
}

void Stage3(Config& c) {
  c.zero.stage = 3;
}
void OptimizerInRam(Config& c) {
  if (c.zero.offload_optimizer.device == Tier::kDevice) OptimizerTo(c, Tier::kCpu);
}
void AllOfTheOptimizer(Config& c) {
  if (c.zero.offload_optimizer.ratio == 1) return;
  c.zero.offload_optimizer.ratio = 1;
  c.zero.offload_optimizer.measures_ratio = false;  // that number, and not what "auto" made of it
}
void OptimizerOnNvme(Config& c) {
  OptimizerTo(c, Tier::kNvme);
}
void ParametersInRam(Config& c) {
  if (c.zero.offload_param.device == Tier::kDevice) ParametersTo(c, Tier::kCpu);
}
void ParametersOnNvme(Config& c) {
  ParametersTo(c, Tier::kNvme);
}
void GradientsInRam(Config& c) {
  if (c.gradient_tier() == Tier::kDevice) GradientsTo(c, Tier::kCpu);
}
void GradientsOnNvme(Config& c) {
  GradientsTo(c, Tier::kNvme);
  NeedFolders(c);
}
void ActivationsInRam(Config& c) {
  if (c.activation_tier() == Tier::kDevice) c.ebb.offload_activations = Tier::kCpu;
}
void ActivationsOnNvme(Config& c) {
  c.ebb.offload_activations = Tier::kNvme;
  NeedFolders(c);
}
void NoPersistence(Config& c) {
  if (c.zero.stage == 3) c.zero.param_persistence_threshold = 0;
}
void NoPrefetch(Config& c) {
  c.ebb.prefetch_depth = 0;
}
void NoCoalescing(Config& c) {
  c.ebb.coalesce_bytes = 0;
}
void RoundsOfOne(Config& c) {
  c.ebb.micro_batches_per_round = 1;
}
void ReduceRounds(Config& c) {
  if (!c.reduces_at_round()) c.ebb.reduce_at = ReduceAt::kRound;
}
void SmallSubGroups(Config& c) {
  c.zero.sub_group_size = std::min(c.zero.sub_group_size, 8 * kCutElements);
}
void SmallestSubGroups(Config& c) {
  c.zero.sub_group_size = std::min(c.zero.sub_group_size, kCutElements);
}
void SplitMaster(Config& c) {
  if (c.compute == DType::kBFloat16 && !c.ebb.stochastic_rounding) c.ebb.split_master = true;
}

// In the order in which they are tried: what costs a step little before what costs it more.
constexpr Change kForDevice[] = {
    Stage3,           AllOfTheOptimizer, OptimizerInRam,   ReduceRounds,      RoundsOfOne,
    ActivationsInRam, ParametersInRam,   GradientsInRam,   NoPersistence,     NoPrefetch,
    NoCoalescing,     OptimizerOnNvme,   ParametersOnNvme, ActivationsOnNvme, GradientsOnNvme,
    SplitMaster,      SmallSubGroups,    SmallestSubGroups};
constexpr Change kForHost[] = {
    OptimizerOnNvme, ParametersOnNvme, ActivationsOnNvme, RoundsOfOne,  GradientsOnNvme,
    NoCoalescing,    SmallSubGroups,   SmallestSubGroups, SplitMaster,  NoPrefetch,
    Stage3,          ReduceRounds,     AllOfTheOptimizer, NoPersistence};

class Search {
 public:
  Search(const Config& config,
         absl::FunctionRef<absl::StatusOr<Pools>(const Config& changed)> lay_out)
      : config_(config), lay_out_(lay_out) {}

  std::string Run() {
    const std::optional<Need> now = NeedOf(config_);
    if (!now) return "raise it";
    const bool device = now->device_over > 0 && now->host_over == 0;
    const std::span<const Change> changes =
        device ? std::span<const Change>(kForDevice) : std::span<const Change>(kForHost);
    for (const Change change : changes) {
      const Config changed = With({&change, 1});
      if (changed == config_) continue;
      if (const auto need = NeedOf(changed); need && need->over() == 0) return Fits(changed, *need);
    }
    return Together(changes, *now);
  }

 private:
  struct Need {
    int64_t device = 0, host = 0;            // bytes
    int64_t device_over = 0, host_over = 0;  // of them, beyond the cap
    int64_t over() const { return device_over + host_over; }
  };

  std::string Together(std::span<const Change> changes, const Need& now) {
    std::vector<Change> taken;
    Need least = now;
    for (const Change change : changes) {
      if (least.over() == 0) break;
      taken.push_back(change);
      const auto need = NeedOf(With(taken));
      if (need && need->over() <= least.over()) {
        least = *need;
      } else {
        taken.pop_back();
      }
    }
    // Without what is as well left alone, the costly first.
    for (size_t i = taken.size(); i-- > 0;) {
      std::vector<Change> fewer = taken;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
      if (const auto need = NeedOf(With(fewer)); need && need->over() <= least.over()) {
        least = *need;
        taken = std::move(fewer);
      }
    }
    const Config changed = With(taken);
    if (least.over() == 0) return Fits(changed, least);
    const std::string wanted =
        "raise it, or take smaller units, a smaller micro-batch or more ranks";
    if (taken.empty()) return absl::StrCat("no other setting needs less: ", wanted);
    return absl::StrCat("no setting fits; the least, ", Shown(least), ", is with ",
                        config::Difference(config_, changed), ": ", wanted);
  }

  Config With(std::span<const Change> changes) const {
    Config changed = config_;
    for (const Change change : changes) change(changed);
    return changed;
  }

  std::optional<Need> NeedOf(const Config& config) const {
    if (!config.Validate().ok()) return std::nullopt;
    const absl::StatusOr<Pools> pools = lay_out_(config);
    if (!pools.ok()) return std::nullopt;
    const auto over = [](int64_t bytes, std::optional<int64_t> cap) {
      return cap ? std::max<int64_t>(0, bytes - *cap) : 0;
    };
    Need need{.device = DeviceBytes(*pools), .host = HostBytes(*pools)};
    need.device_over = over(need.device, config.ebb.device_memory);
    need.host_over = over(need.host, config.ebb.host_memory);
    return need;
  }

  std::string Shown(const Need& need) const {
    return absl::StrCat(Megabytes(need.device), " on the device and ", Megabytes(need.host),
                        " in host memory");
  }
  std::string Fits(const Config& changed, const Need& need) const {
    return absl::StrCat(config::Difference(config_, changed), " would fit (", Shown(need),
                        "), or raise it");
  }

  const Config& config_;
  absl::FunctionRef<absl::StatusOr<Pools>(const Config& changed)> lay_out_;
};

}  // namespace

std::string FindAdvice(const Config& config,
                       absl::FunctionRef<absl::StatusOr<Pools>(const Config& changed)> lay_out) {
  return Search(config, lay_out).Run();
}

}  // namespace ebb::sharding
