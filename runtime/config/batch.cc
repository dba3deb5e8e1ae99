// Config::ForWorld: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps
// * data ranks, completed and checked as in DeepSpeed, but nothing is ever rounded.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/convert.h"
#include "ebb/runtime/config/problems.h"
#include "ebb/runtime/config/reader.h"

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
  int64_t world = 1;                               // data ranks
  std::string_view ranks = " ranks";

  std::string Number(int64_t value) const {
    return value == 0 ? "(not given)" : std::to_string(value);
  }
  std::string Numbers() const {
    return Join({"\"train_batch_size\" ", Number(train), ", \"train_micro_batch_size_per_gpu\" ",
                 Number(micro), ", \"gradient_accumulation_steps\" ", Number(accumulation), ", ",
                 std::to_string(world), world == 1 ? ranks.substr(0, ranks.size() - 1) : ranks});
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

  void Complete(Problems& problems) {
    constexpr std::string_view kTrain = "train_batch_size";
    if (train == 0 && micro == 0) {
      return problems.AddTogether(
          kTrain, {"the batch size is not given (", Numbers(),
                   "): give \"train_batch_size\" or \"train_micro_batch_size_per_gpu\" as a "
                   "number; \"auto\" counts as not given unless the trainer sets it "
                   "(in C++ ReadOptions::trainer, in Python transformers' Trainer)"});
    }
    int64_t unit = 0;  // the train batch must be a multiple of it; if both are given, be
    if (__builtin_mul_overflow(std::max<int64_t>(micro, 1) * std::max<int64_t>(accumulation, 1),
                               world, &unit)) {
      return problems.AddTogether(kTrain, {"the batch has more than 2^63 samples: ", Numbers()});
    }
    const bool has_all = micro > 0 && accumulation > 0;
    if (train > 0 && (has_all ? train != unit : train % unit != 0)) {
      return problems.AddTogether(
          kTrain,
          {"the batch sizes do not fit: \"train_batch_size\" must be "
           "\"train_micro_batch_size_per_gpu\" * \"gradient_accumulation_steps\" *",
           ranks, ", but the numbers are ", Numbers(), "; nearest that fit: ", Choices(unit)});
    }
    if (micro > 0) {
      if (accumulation == 0) accumulation = train > 0 ? train / unit : 1;
    } else {
      if (accumulation == 0) accumulation = 1;
      micro = train / accumulation / world;
    }
    train = micro * accumulation * world;
  }
};

// Whether the number of `key` divides `whole`, which is called `shown`; adds a problem if not.
bool Divides(std::string_view key, int64_t number, int64_t whole, std::string_view shown,
             std::string_view path, Problems& problems) {
  if (whole % number == 0) return true;
  problems.AddTogether(path, {Quoted(key), " ", std::to_string(number), " does not divide ", shown,
                              "; nearest that do: ", DivisorsNear(whole, number)});
  return false;
}

void ResolveRounds(Config& config, Problems& problems) {
  constexpr std::string_view kKey = "ebb.micro_batches_per_round";
  const int64_t accumulation = config.gradient_accumulation_steps;
  int64_t& of_round = config.ebb.micro_batches_per_round;
  if (of_round == 0) of_round = accumulation;
  if (of_round == 0) return;
  Divides(kKey, of_round, accumulation,
          Join({"\"gradient_accumulation_steps\" ", std::to_string(accumulation)}), kKey, problems);
}

// ebb.shard_group, given under either of its names. Sums run within the shard groups first, so the
// reduction group is the shard group.
void ResolveShardGroup(int world, Config& config, Problems& problems) {
  constexpr std::string_view kOwn = "ebb.shard_group", kMics = "zero_optimization.mics_shard_size";
  int64_t& shards = config.ebb.shard_group;
  const int64_t mics = config.zero.mics_shard_size, reduction = config.ebb.reduction_group;
  const std::string_view key = shards > 0 ? kOwn : kMics;
  if (mics > 0 && shards > 0 && mics != shards) {
    return problems.AddTogether(
        kOwn, {Quoted(kMics), " ", std::to_string(mics), " and ", Quoted(kOwn), " ",
               std::to_string(shards), " are two names of one number; give one of them"});
  }
  if (shards == 0) shards = std::max<int64_t>(mics, 0);
  if (shards == 0 || shards == world) return;
  const std::string ranks = Join({std::to_string(world), " ranks"});
  if (!Divides(key, shards, world, ranks, kOwn, problems)) return;
  if (config.zero.stage == 0) {
    return problems.AddTogether(
        kOwn, {Quoted(key), " ", std::to_string(shards),
               " cuts states over groups of ranks, but at \"zero_optimization.stage\" 0 nothing "
               "is cut; choose stage 1, 2 or 3, or leave the group out"});
  }
  if (reduction != 0 && reduction != shards) {
    problems.AddTogether(
        kOwn, {"\"ebb.reduction_group\" ", std::to_string(reduction), " is not the shard group of ",
               std::to_string(shards), " ranks (", Quoted(key),
               "), but gradients are summed in shard groups first; leave it out"});
  }
}

// Sets 1 if the given value would change nothing. At other stages the file's reader makes a remark.
void ResolvePartition(int world, Config& config, Problems& problems) {
  constexpr std::string_view kKey = "zero_optimization.zero_hpz_partition_size";
  int64_t& size = config.zero.hpz_partition_size;
  const int64_t given = std::exchange(size, 1);
  if (given <= 1 || config.zero.stage < 3) return;
  const int64_t shards = config.ebb.shard_group > 0 ? config.ebb.shard_group : world;
  const std::string over = Join({std::to_string(shards), shards == 1 ? " rank" : " ranks",
                                 shards < world ? " of a shard group" : ""});
  if (given >= shards) {
    Remark(config.remarks,
           {Quoted(kKey), " ", std::to_string(given), " changes nothing: parameters are cut over ",
            over, ", which together hold one copy anyway"});
  } else if (Divides(kKey, given, shards, over, kKey, problems)) {
    size = given;
  }
}

// EBB_IO_URING=0 switches io_uring off on one machine or in one run.
void TakeEnvironment(Config& config, Problems& problems) {
  const char* const given = std::getenv("EBB_IO_URING");
  const std::string_view value = given == nullptr ? "" : given;
  if (value != "" && value != "0" && value != "1") {
    return problems.AddTogether("ebb.io_backend",
                                {"EBB_IO_URING in the environment is \"", value,
                                 "\"; allowed: 0, which is \"ebb.io_backend\" \"threads\", or 1"});
  }
  if (value == "0" && config.ebb.io_backend == IoBackend::kAuto) {
    config.ebb.io_backend = IoBackend::kThreads;
  }
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
  if (const int64_t tensor = ebb.mesh.tensor; tensor > 1) {
    Config of_data = *this;
    of_data.ebb.mesh.tensor = 1;
    const int64_t data = std::max<int64_t>(preferred / tensor, 1);
    return static_cast<int>(of_data.FittingWorld(static_cast<int>(data)) * tensor);
  }
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
  if (const int64_t tensor = config.ebb.mesh.tensor; tensor > 1) {
    constexpr std::string_view kKey = "ebb.mesh.tensor";
    if (!Divides(kKey, tensor, world, Join({std::to_string(world), " ranks"}), kKey, problems))
      return;
    world = config.ebb.mesh.DataRanks(world);
  }
  Triple batch{config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps,
               world, config.ebb.mesh.tensor > 1 ? " data ranks" : " ranks"};
  batch.Complete(problems);
  config.train_batch_size = batch.train;
  config.micro_batch_size = batch.micro;
  config.gradient_accumulation_steps = batch.accumulation;
  config.communication = config.communication_dtype();
  config.ebb.reduce_at = config.reduces_at_round() ? ReduceAt::kRound : ReduceAt::kStep;
  ResolveRounds(config, problems);
  if (const int64_t group = config.ebb.reduction_group; group != 0) {
    constexpr std::string_view kKey = "ebb.reduction_group";
    Divides(kKey, group, world, Join({std::to_string(world), " ranks"}), kKey, problems);
  }
  ResolveShardGroup(world, config, problems);
  ResolvePartition(world, config, problems);
  TakeEnvironment(config, problems);
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
