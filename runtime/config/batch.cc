// Config::ForWorld: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps
// * world, completed and checked as in DeepSpeed, but nothing is ever rounded.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/convert.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/problems.h"
#include "ebb/runtime/config/reader.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

using config::Invalid;
using config::Join;
using config::Problems;
using config::Quoted;
using config::Remark;

// The limit of the search for a divisor.
constexpr int64_t kSearch = 100'000;

// The divisors of `whole` next to `near`, below and above: "4 or 8". "" if none is close.
std::string DivisorsNear(int64_t whole, int64_t near) {
  std::string text;
  int64_t below = std::min(near, whole);
  const int64_t lowest = std::max<int64_t>(1, below - kSearch);
  while (below >= lowest && whole % below != 0) --below;
  if (below >= lowest) text = std::to_string(below);
  int64_t above = near + 1;
  const int64_t highest = std::min(whole, near + kSearch);
  while (above <= highest && whole % above != 0) ++above;
  if (above <= highest) text += Join({text.empty() ? "" : " or ", std::to_string(above)});
  return text;
}

// The positive multiples of `unit` next to `near`, which is not one itself.
std::string MultiplesNear(int64_t unit, int64_t near) {
  const int64_t below = near / unit * unit;
  std::string text = below > 0 ? std::to_string(below) : "";
  if (int64_t above = 0; !__builtin_add_overflow(below, unit, &above)) {
    text += Join({text.empty() ? "" : " or ", std::to_string(above)});
  }
  return text;
}

struct Triple {
  int64_t train = 0, micro = 0, accumulation = 0;  // 0: not given
  int64_t world = 1;

  std::string Number(int64_t value) const {
    return value == 0 ? "(not given)" : std::to_string(value);
  }
  std::string Numbers() const {
    return Join({"\"train_batch_size\" ", Number(train), ", \"train_micro_batch_size_per_gpu\" ",
                 Number(micro), ", \"gradient_accumulation_steps\" ", Number(accumulation), ", ",
                 std::to_string(world), world == 1 ? " rank" : " ranks"});
  }

  // Values of one number that fit the others.
  std::string Choices(int64_t unit) const {
    const bool has_all = micro > 0 && accumulation > 0;
    std::string text = Join(
        {"\"train_batch_size\" ", has_all ? std::to_string(unit) : MultiplesNear(unit, train)});
    if (train % world != 0) return text;
    const int64_t of_rank = train / world;
    const auto add = [&](std::string_view key, int64_t given, int64_t other) {
      if (given == 0) return;
      std::string fitting;
      if (!has_all) {
        fitting = DivisorsNear(of_rank, given);
      } else if (of_rank % other == 0) {
        fitting = std::to_string(of_rank / other);
      }
      if (!fitting.empty()) text += Join({", or \"", key, "\" ", fitting});
    };
    add("train_micro_batch_size_per_gpu", micro, accumulation);
    add("gradient_accumulation_steps", accumulation, micro);
    return text;
  }

  absl::Status Complete() {
    if (train == 0 && micro == 0) {
      return Invalid({"the batch size is not given (", Numbers(),
                      "): give \"train_batch_size\" or \"train_micro_batch_size_per_gpu\" as a "
                      "number; \"auto\" counts as not given unless the trainer sets it "
                      "(in C++ ReadOptions::trainer, in Python transformers' Trainer)"});
    }
    int64_t unit = 0;  // the train batch must be a multiple of it; if both are given, be
    if (__builtin_mul_overflow(std::max<int64_t>(micro, 1) * std::max<int64_t>(accumulation, 1),
                               world, &unit)) {
      return Invalid({"the batch has more than 2^63 samples: ", Numbers()});
    }
    const bool has_all = micro > 0 && accumulation > 0;
    if (train > 0 && (has_all ? train != unit : train % unit != 0)) {
      return Invalid(
          {"the batch sizes do not fit: \"train_batch_size\" must be "
           "\"train_micro_batch_size_per_gpu\" * \"gradient_accumulation_steps\" * ranks, but the "
           "numbers are ",
           Numbers(), "; nearest that fit: ", Choices(unit)});
    }
    if (micro > 0) {
      if (accumulation == 0) accumulation = train > 0 ? train / unit : 1;
    } else {
      if (accumulation == 0) accumulation = 1;
      micro = train / accumulation / world;
    }
    train = micro * accumulation * world;
    return absl::OkStatus();
  }
};

absl::Status ResolveRounds(Config& config) {
  const int64_t accumulation = config.gradient_accumulation_steps;
  int64_t& of_round = config.ebb.micro_batches_per_round;
  if (of_round == 0) of_round = accumulation;
  if (of_round == 0 || accumulation % of_round == 0) return absl::OkStatus();
  return Invalid({"\"ebb.micro_batches_per_round\" ", std::to_string(of_round),
                  " does not divide \"gradient_accumulation_steps\" ", std::to_string(accumulation),
                  "; nearest that do: ", DivisorsNear(accumulation, of_round)});
}

// ebb.shard_group, given under either of its names. Sums run within the shard groups first, so the
// reduction group is the shard group.
absl::Status ResolveShardGroup(int world, Config& config) {
  int64_t& shards = config.ebb.shard_group;
  const int64_t mics = config.zero.mics_shard_size;
  if (mics > 0 && shards > 0 && mics != shards) {
    return Invalid({"\"zero_optimization.mics_shard_size\" ", std::to_string(mics),
                    " and \"ebb.shard_group\" ", std::to_string(shards),
                    " are two names of one number; give one of them"});
  }
  const std::string_view key = shards > 0 ? "ebb.shard_group" : "zero_optimization.mics_shard_size";
  if (shards == 0 && mics > 0) shards = mics;
  if (shards == 0) return absl::OkStatus();
  if (world % shards != 0) {
    return Invalid({"\"", key, "\" ", std::to_string(shards), " does not divide ",
                    std::to_string(world),
                    " ranks; nearest that do: ", DivisorsNear(world, shards)});
  }
  if (shards == world) return absl::OkStatus();
  if (config.zero.stage == 0) {
    return Invalid({"\"", key, "\" ", std::to_string(shards),
                    " cuts states over groups of ranks, but at \"zero_optimization.stage\" 0 "
                    "nothing is cut; choose stage 1, 2 or 3, or leave the group out"});
  }
  if (config.ebb.reduction_group != 0 && config.ebb.reduction_group != shards) {
    return Invalid({"\"ebb.reduction_group\" ", std::to_string(config.ebb.reduction_group),
                    " is not the shard group of ", std::to_string(shards), " ranks (\"", key,
                    "\"), but gradients are summed in shard groups first; leave it out"});
  }
  return absl::OkStatus();
}

// Sets 1 if the given value would change nothing. At other stages the file's reader makes a remark.
absl::Status ResolvePartition(int world, Config& config) {
  int64_t& size = config.zero.hpz_partition_size;
  const int64_t given = std::exchange(size, 1);
  if (given <= 1 || config.zero.stage < 3) return absl::OkStatus();
  constexpr std::string_view kKey = "zero_optimization.zero_hpz_partition_size";
  const int64_t shards = config.ebb.shard_group > 0 ? config.ebb.shard_group : world;
  const std::string over = Join({std::to_string(shards), shards == 1 ? " rank" : " ranks",
                                 shards < world ? " of a shard group" : ""});
  if (given >= shards) {
    Remark(config.remarks, Join({Quoted(kKey), " ", std::to_string(given),
                                 " changes nothing: parameters are cut over ", over,
                                 ", which together hold one copy anyway"}));
    return absl::OkStatus();
  }
  if (shards % given != 0) {
    return Invalid({Quoted(kKey), " ", std::to_string(given), " does not divide ", over,
                    "; nearest that do: ", DivisorsNear(shards, given)});
  }
  size = given;
  return absl::OkStatus();
}

// EBB_IO_URING=0 switches io_uring off on one machine or in one run.
absl::Status TakeEnvironment(Config& config) {
  const char* const given = std::getenv("EBB_IO_URING");
  const std::string_view value = given == nullptr ? "" : given;
  if (value != "" && value != "0" && value != "1") {
    return Invalid({"EBB_IO_URING in the environment is \"", value,
                    "\"; allowed: 0, which is \"ebb.io_backend\" \"threads\", or 1"});
  }
  if (value == "0" && config.ebb.io_backend == IoBackend::kAuto) {
    config.ebb.io_backend = IoBackend::kThreads;
  }
  return absl::OkStatus();
}

// States, gradients and activations share one swap file.
void ResolvePaths(Config& config) {
  ZeroConfig& zero = config.zero;
  if (!zero.offload_optimizer.nvme_paths.empty()) return;
  if (config.gradient_tier() == Tier::kNvme || config.activation_tier() == Tier::kNvme) {
    zero.offload_optimizer.nvme_paths = zero.offload_param.nvme_paths;
  }
}

}  // namespace

int Config::FittingWorld(int preferred) const {
  const int64_t unit =
      std::max<int64_t>(micro_batch_size, 1) * std::max<int64_t>(gradient_accumulation_steps, 1);
  if (preferred < 1 || train_batch_size <= 0 || train_batch_size % unit != 0) return preferred;
  const int64_t ranks = train_batch_size / unit;
  if (micro_batch_size > 0 && gradient_accumulation_steps > 0) {
    return ranks <= std::numeric_limits<int>::max() ? static_cast<int>(ranks) : preferred;
  }
  int fitting = preferred;
  while (ranks % fitting != 0) --fitting;
  return fitting;
}

void config::CompleteForWorld(int world, Config& config, Problems& problems) {
  const auto add = [&](std::string_view path, const absl::Status& status) {
    if (!status.ok())
      problems.AddTogether(path, {{status.message().data(), status.message().size()}});
  };
  Triple batch{config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps,
               world};
  add("train_batch_size", batch.Complete());
  config.train_batch_size = batch.train;
  config.micro_batch_size = batch.micro;
  config.gradient_accumulation_steps = batch.accumulation;
  config.communication = config.communication_dtype();
  config.ebb.reduce_at = config.reduces_at_round() ? ReduceAt::kRound : ReduceAt::kStep;
  add("ebb.micro_batches_per_round", ResolveRounds(config));
  if (const int64_t group = config.ebb.reduction_group; group != 0 && world % group != 0) {
    add("ebb.reduction_group",
        Invalid({"\"ebb.reduction_group\" ", std::to_string(group), " does not divide ",
                 std::to_string(world), " ranks; nearest that do: ", DivisorsNear(world, group)}));
  }
  add("ebb.shard_group", ResolveShardGroup(world, config));
  add("zero_optimization.zero_hpz_partition_size", ResolvePartition(world, config));
  add("ebb.io_backend", TakeEnvironment(config));
  ResolvePaths(config);
}

absl::StatusOr<Config> Config::ForWorld(int world) const {
  if (world < 1) return Invalid({"a world has at least one rank, not ", std::to_string(world)});
  EBB_RETURN_IF_ERROR(Validate());
  Config resolved = *this;
  Problems problems;
  config::CompleteForWorld(world, resolved, problems);
  EBB_RETURN_IF_ERROR(problems.status());
  EBB_RETURN_IF_ERROR(resolved.Validate());  // a derived number may be too large
  return resolved;
}

}  // namespace ebb
