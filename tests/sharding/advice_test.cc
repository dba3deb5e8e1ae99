// What the error of a cap advises is what fits: each piece of advice is taken, as the JSON that it is.
#include "ebb/sharding/advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ebb/sharding/budget.h"
#include "unit_chain.h"

namespace ebb::sharding {
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

Config OnNvme() {
  Config config = OnDevice(3);
  config.zero.offload_param = {.device = Tier::kNvme, .nvme_paths = {"/disk"}, .max_in_cpu = 0};
  config.zero.offload_optimizer = {.device = Tier::kNvme, .nvme_paths = {"/disk"}};
  return config;
}

// As Engine::Create sees it. Boundaries of 1 MiB, eight units of half a million elements.
absl::StatusOr<Pools> LaidOut(const Config& config, int world) {
  if (absl::Status valid = config.Validate(); !valid.ok()) return valid;
  const absl::StatusOr<Config> resolved = config.ForWorld(world);
  if (!resolved.ok()) return resolved.status();
  const ModelSpec model = UnitChain(std::vector<int64_t>(8, kMebi / 2), /*output_bytes=*/kMebi);
  auto plan =
      PlanStep({.model = &model, .config = &*resolved, .world = world, .optimizer_states = 2});
  if (!plan.ok()) return plan.status();
  return plan->pools;
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

std::string Refusal(const Config& config, int world) {
  const absl::Status status = LaidOut(config, world).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  return std::string(status.message());
}

TEST(Advice, OneChangeThatSufficesIsToldAlone) {
  Config config = OnNvme();
  config.zero.param_persistence_threshold = 0;
  config.ebb.prefetch_depth = 0;
  config.ebb.device_memory = DeviceBytes(*LaidOut(config, 1)) - kMebi;
  EXPECT_THAT(Refusal(config, 1),
              AllOf(HasSubstr("activation 8.0 MiB"),
                    HasSubstr("); {\"ebb\": {\"offload_activations\": \"cpu\"}} would fit (")));
}

TEST(Advice, OfHostMemoryWhatIsInItGoesToTheDisk) {
  Config config = OnNvme();
  config.zero.sub_group_size = 2048;
  config.zero.offload_param.buffer_count = 2;
  const int64_t least = HostBytes(*LaidOut(config, 1));
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

// From what nothing can fit to what everything does.
TEST(Advice, WhatIsAdvisedFitsAndTheLeastDoesNot) {
  int fitted = 0, impossible = 0;
  for (const int world : {1, 2}) {
    for (const Config& start : {OnDevice(0), OnDevice(1), OnDevice(3), OnNvme()}) {
      const auto free = LaidOut(start, world);
      ASSERT_TRUE(free.ok()) << free.status();
      for (const bool device : {true, false}) {
        for (const int share : {2, 5, 10, 20, 40, 60, 80, 95}) {
          Config config = start;
          (device ? config.ebb.device_memory : config.ebb.host_memory) =
              share * (device ? DeviceBytes(*free) : HostBytes(*free) + 4096) / 100;
          if (!device && share > 50) config.ebb.device_memory = DeviceBytes(*free) / 2;
          const absl::Status status = LaidOut(config, world).status();
          if (status.ok()) continue;
          SCOPED_TRACE(config.ToJson());
          SCOPED_TRACE(status.message());
          ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
          const std::string message(status.message());
          const auto taken = Taken(config, message);
          ASSERT_TRUE(taken.ok()) << taken.status();
          if (message.find(" would fit (") != std::string::npos) {
            EXPECT_EQ(LaidOut(*taken, world).status(), absl::OkStatus());
            EXPECT_NE(*taken, config);
            ++fitted;
            continue;
          }
          EXPECT_FALSE(LaidOut(*taken, world).ok());
          ++impossible;
        }
      }
    }
  }
  EXPECT_GT(fitted, 20);
  EXPECT_GT(impossible, 5);
}

}  // namespace
}  // namespace ebb::sharding
