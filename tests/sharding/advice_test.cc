// Advice in the error of a cap fits: each piece is taken, as the JSON that it is.
#include "ebb/sharding/fit/advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/fit/budget.h"
#include "ebb/sharding/memory_model.h"
#include "every_change.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::advice_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMebi = int64_t{1} << 20;

Config OnDevice(int stage) {
  Config config;
  config.micro_batch_size = 1;
  config.gradient_accumulation_steps = 4;
  config.compute = DType::kBFloat16;
  config.zero.stage = stage;
  return config;
}

// Nothing is in memory that a key can keep out, so a cap leaves other changes.
Config Lean(Config config) {
  config.zero.param_persistence_threshold = 0;
  config.ebb.coalesce_bytes = 0;
  config.ebb.prefetch_depth = 0;
  return config;
}

Config OnNvme() {
  Config config = OnDevice(3);
  config.zero.offload_param = {.device = Tier::kNvme, .nvme_paths = {"/disk"}, .max_in_cpu = 0};
  config.zero.offload_optimizer = {.device = Tier::kNvme, .nvme_paths = {"/disk"}};
  return config;
}

// Boundaries of 1 MiB, eight units of half a million elements.
ModelSpec Chain(size_t units = 8) {
  return UnitChain(std::vector<int64_t>(units, kMebi / 2), /*output_bytes=*/kMebi);
}

// The table that Engine::Create would lay out.
absl::StatusOr<Table> LaidOut(const Config& config, int world, size_t units = 8) {
  EBB_RETURN_IF_ERROR(config.Validate());
  EBB_ASSIGN_OR_RETURN(const Config resolved, config.ForWorld(world));
  const ModelSpec model = Chain(units);
  EBB_ASSIGN_OR_RETURN(
      Plan plan,
      PlanStep({.model = &model, .config = &resolved, .world = world, .optimizer_states = 2}));
  return std::move(plan.table);
}

// The config with the change that `message` has merged into it, read from JSON again.
absl::StatusOr<Config> Taken(const Config& config, const std::string& message) {
  nlohmann::json document = nlohmann::json::parse(config.ToJson());
  if (const size_t begin = message.find('{'); begin != std::string::npos) {
    document.merge_patch(
        nlohmann::json::parse(message.substr(begin, message.rfind('}') + 1 - begin)));
  }
  return Config::FromJson(document.dump());
}

std::string Refusal(const Config& config, int world, size_t units = 8) {
  const absl::Status status = LaidOut(config, world, units).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  return std::string(status.message());
}

TEST(Advice, OneChangeThatSufficesIsAdvisedAlone) {
  Config config = OnNvme();
  config.zero.param_persistence_threshold = 0;
  config.ebb.prefetch_depth = 0;
  config.ebb.device_memory = DeviceBytes(LaidOut(config, 1)->bytes) - kMebi;
  EXPECT_THAT(Refusal(config, 1),
              AllOf(HasSubstr("activation 8.0 MiB"),
                    HasSubstr("); {\"ebb\": {\"offload_activations\": \"cpu\"}} would fit (")));
}

TEST(Advice, MovesGradientsFromTooSmallRamToTheDisk) {
  Config config = OnNvme();
  config.zero.sub_group_size = 2048;
  config.zero.offload_param.buffer_count = 2;
  const int64_t least = HostBytes(LaidOut(config, 1)->bytes);
  config.ebb.host_memory = least - 2 * kMebi;
  EXPECT_THAT(Refusal(config, 1),
              HasSubstr("{\"ebb\": {\"offload_gradients\": \"nvme\"}} would fit ("));
}

TEST(Advice, FoldersThatAreNotGivenAreAskedFor) {
  Config config = OnDevice(2);
  config.zero.offload_optimizer.device = Tier::kCpu;
  config.ebb.host_memory = 24 * kMebi;
  EXPECT_THAT(Refusal(config, 1),
              AllOf(HasSubstr("\"nvme\""), HasSubstr("nvme_path\": \"FOLDER\"")));
}

// If the device's room is not known, advice may take more of it only if nothing else fits.
TEST(Advice, MovesStatesFromTooSmallRamToTheDeviceIfTheyFit) {
  Config config = OnDevice(2);
  config.zero.offload_optimizer = {.device = Tier::kCpu, .nvme_paths = {"/disk"}};
  config.ebb.host_memory = kMebi / 4;
  EXPECT_THAT(Refusal(config, 1), AllOf(HasSubstr("\"offload_optimizer\": {\"device\": \"none\"}"),
                                        HasSubstr(" would fit if the device has room for it (")));
  config.ebb.device_memory = 128 * kMebi;
  EXPECT_THAT(
      Refusal(config, 1),
      HasSubstr("; {\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"none\"}}} "
                "would fit (82.3 MiB on the device and 0.0 MiB"));
}

// Below stage 2 it is another.
TEST(Advice, AdvisesAStageWithTheReduceAtThatKeepsTheSums) {
  Config config = Lean(OnDevice(3));
  config.ebb.split_master = true;
  // Then the whole gradients of a step take no more memory than those of a round.
  config.accumulation = DType::kBFloat16;
  config.ebb.reduce_at = ReduceAt::kStep;
  config.ebb.device_memory = DeviceBytes(LaidOut(config, 4, /*units=*/2)->bytes);
  config.ebb.host_memory = 1;
  config.ebb.reduce_at = ReduceAt::kDefault;
  config.zero.stage = 1;
  const std::string message = Refusal(config, 4, /*units=*/2);
  EXPECT_THAT(message, HasSubstr("; {\"zero_optimization\": {\"stage\": 3}, \"ebb\": "
                                 "{\"reduce_at\": \"step\"}} would fit ("));
  EXPECT_EQ(LaidOut(*Taken(config, message), 4, /*units=*/2).status(), absl::OkStatus());
}

// Which is not in the file, though the resolved config has it for the gradients.
TEST(Advice, AdvisesTheParametersFolderForTheOptimizer) {
  Config config = OnNvme();
  config.zero.offload_optimizer = {.device = Tier::kCpu};
  config.ebb.offload_gradients = Tier::kNvme;
  config.zero.sub_group_size = kCutElements;
  config.ebb.device_memory = DeviceBytes(LaidOut(config, 1)->bytes);
  config.ebb.host_memory = HostBytes(LaidOut(config, 1)->bytes) / 2;
  const std::string message = Refusal(config, 1);
  EXPECT_THAT(message, HasSubstr("; {\"zero_optimization\": {\"offload_optimizer\": {\"device\": "
                                 "\"nvme\", \"nvme_path\": \"/disk\"}}} would fit ("));
  EXPECT_EQ(LaidOut(*Taken(config, message), 1).status(), absl::OkStatus());
}

TEST(Advice, LowersASettingNoMoreThanNecessary) {
  Config config = Lean(OnDevice(3));
  config.ebb.prefetch_depth = 2;
  config.ebb.device_memory = DeviceBytes(LaidOut(config, 2)->bytes);
  config.ebb.host_memory = 1;
  config.ebb.prefetch_depth = 7;
  EXPECT_THAT(Refusal(config, 2), HasSubstr("; {\"ebb\": {\"prefetch_depth\": 2}} would fit ("));
}

TEST(Advice, SecondaryShardsGoWhereTheirMemoryIsMissing) {
  Config config = Lean(OnDevice(3));
  config.ebb.device_memory = DeviceBytes(LaidOut(config, 4)->bytes);
  config.ebb.host_memory = 1;
  config.zero.hpz_partition_size = 2;
  EXPECT_THAT(Refusal(config, 4),
              AllOf(HasSubstr("secondary 4.0 MiB"),
                    HasSubstr("; {\"zero_optimization\": {\"zero_hpz_partition_size\": 1}} would "
                              "fit (")));
}

// All that can be changed, and pools that always need too much.
TEST(Advice, LaysOutNoMoreThanItSays) {
  Config config = OnNvme();
  config.zero.offload_param.max_in_cpu = 1;
  config.zero.offload_optimizer.ratio = 0.5;
  config.ebb.reduce_at = ReduceAt::kStep;
  config.ebb.micro_batches_per_round = 4;
  config.ebb.offload_activations = Tier::kCpu;
  config.ebb.device_memory = 1;
  const auto with = [](int64_t bytes, int& trials) {
    return [bytes, &trials](const Config&) {
      ++trials;
      Table table;
      table.bytes.Of(Tier::kDevice, StateClass::kParameter) = bytes;
      return table;
    };
  };
  // Neither if their least need rules all of them out, nor if it excludes none.
  for (const int64_t least : {64, 1}) {
    int trials = 0, least_trials = 0;
    const std::string advice =
        FindAdvice(config, {.device = 64},
                   {.lay_out = with(128, trials), .lay_out_least = with(least, least_trials)})
            .text;
    EXPECT_THAT(advice, HasSubstr("no other setting needs less"));
    EXPECT_LE(trials, kAdviceTrialsMax);
    EXPECT_LE(least_trials, kAdviceTrialsMax);
    EXPECT_GT(least_trials, kAdviceTrialsMax / 2);
  }
}

// The work does not grow with a model: of units that no host holds it ends as of small ones.
TEST(Advice, IsFoundForUnitsOfAnySize) {
  const ModelSpec model = UnitChain({int64_t{1} << 42, int64_t{1} << 42}, kMebi);
  for (const bool has_host : {false, true}) {
    Config config = OnDevice(3);
    config.ebb.device_memory = int64_t{1} << 30;
    if (has_host) config.ebb.host_memory = int64_t{1} << 30;
    const Config resolved = *config.ForWorld(2);
    EXPECT_THAT(
        FindAdvice({.model = &model, .config = &resolved, .world = 2, .optimizer_states = 2},
                   CapsOf(resolved))
            .text,
        HasSubstr("no setting fits; the least, "));
  }
}

// More than the config needs may be there by then.
TEST(Advice, AdvisesTheLeastNeedOfAFilledTier) {
  Config config = OnDevice(2);
  config.zero.offload_optimizer = {.device = Tier::kCpu, .nvme_paths = {"/disk"}};
  config.ebb.device_memory = 64 * kMebi;
  config.ebb.host_memory = 40 * kMebi;
  const std::string message = Refusal(config, 1);
  EXPECT_THAT(message, AllOf(HasSubstr("\"nvme\""), HasSubstr(" on the device and at least ")));
}

// Keys in the JSON of a message. A swap folder does not count.
int KeysOf(const nlohmann::json& json) {
  int keys = 0;
  for (const auto& [name, value] : json.items())
    keys += value.is_object() ? KeysOf(value) : name == "nvme_path" ? 0 : 1;
  return keys;
}

TEST(Advice, IsTheSmallestChangeThatFitsAndElseTheLeast) {
  int fitted = 0, grown = 0, changed = 0, impossible = 0;
  for (uint64_t seed = 1; seed <= static_cast<uint64_t>(Cases(150)); ++seed) {
    const CappedCase capped(seed);
    const absl::StatusOr<Config> resolved = capped.given.ForWorld(capped.world);
    ASSERT_TRUE(resolved.ok()) << "seed " << seed << resolved.status();
    const absl::Status status = PlanStep(capped.inputs(*resolved)).status();
    if (status.code() != absl::StatusCode::kResourceExhausted) continue;
    SCOPED_TRACE(absl::StrCat("seed ", seed, " world ", capped.world, capped.given.ToJson()));
    SCOPED_TRACE(status.message());
    const std::string message(status.message());
    const BruteForce all(capped, *resolved);
    ASSERT_OK_AND_ASSIGN(const Config taken, Taken(capped.given, message));
    ASSERT_OK_AND_ASSIGN(const Config applied, taken.ForWorld(capped.world));
    if (!all.keeping.any() && !all.changing.any()) {
      EXPECT_THAT(message, ::testing::AnyOf(HasSubstr("no setting fits"),
                                            HasSubstr("no other setting needs less")));
      EXPECT_EQ(Beyond(*PlanTable(capped.inputs(applied)), applied), all.least());
      ++impossible;
      continue;
    }
    EXPECT_EQ(PlanStep(capped.inputs(applied)).status(), absl::OkStatus());
    const BruteForce::Fewest& fewest = all.keeping.any() ? all.keeping : all.changing;
    const bool grows = fewest.keys == INT_MAX;
    EXPECT_THAT(message, HasSubstr(grows ? " would fit if the device has room" : " would fit ("));
    const size_t begin = message.find('{');
    ASSERT_NE(begin, std::string::npos);
    EXPECT_EQ(KeysOf(nlohmann::json::parse(message.substr(begin, message.rfind('}') + 1 - begin))),
              grows ? fewest.growing : fewest.keys);
    EXPECT_EQ(message.find("changes the numbers") != std::string::npos, !all.keeping.any());
    ++(!all.keeping.any() ? changed : grows ? grown : fitted);
  }
  EXPECT_GT(changed, 3);
  EXPECT_GT(fitted, 20);
  EXPECT_GT(grown, 3);
  EXPECT_GT(impossible, 10);
}

// Where the device's memory is the host's, what leaves one for the other is no help.
TEST(Advice, FitsAlsoIfTheDevicesMemoryIsTheHosts) {
  constexpr int kWorld = 2;
  Config filled = OnNvme();
  filled.ebb.host_memory = int64_t{1} << 40;
  int fitted = 0, impossible = 0;
  for (const Config& start : {OnDevice(0), OnDevice(2), OnNvme(), filled}) {
    const auto bytes = [&](const Config& config) {
      const auto table = LaidOut(config, kWorld);
      EXPECT_OK(table);
      const PoolBytes& pools = table->bytes;
      return DeviceBytes(pools) + HostBytes(pools) + StateStagingBytes(pools, /*has_gpu=*/false);
    };
    for (const int share : {2, 30, 60, 95}) {
      const int64_t cap = bytes(start) * share / 100;
      const Config resolved = *start.ForWorld(kWorld);
      const ModelSpec model = Chain();
      const std::string message =
          FindAdvice({.model = &model, .config = &resolved, .world = kWorld, .optimizer_states = 2},
                     {.together = cap, .of_config = false, .relief = "free memory"})
              .text;
      SCOPED_TRACE(message);
      ASSERT_OK_AND_ASSIGN(const auto taken, Taken(start, message));
      if (message.find(" would fit (") != std::string::npos) {
        EXPECT_LE(bytes(taken), cap);
        EXPECT_THAT(message, HasSubstr("or free memory"));
        ++fitted;
        continue;
      }
      EXPECT_GT(bytes(taken), cap);
      EXPECT_THAT(message, HasSubstr("more hosts"));
      ++impossible;
    }
  }
  EXPECT_GT(fitted, 5);
  EXPECT_GT(impossible, 2);
}

}  // namespace
}  // namespace ebb::sharding::advice_test
