// Text that nobody meant as a configuration: always an answer, never a crash, and what is accepted
// can be written and read again. Run under the sanitizers this is a small, reproducible fuzzer.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/keys.h"
#include "gtest/gtest.h"

namespace ebb {
namespace {

constexpr char kRich[] = R"(// comment
{ "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1e0,
  "fp16": {"enabled": true, "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1},
  "bfloat16": {"enabled": false}, /* more */
  "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000, "warmup_type": "log"}},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": true,
                        "offload_param": {"device": "nvme", "nvme_path": ["/a", "/b"]},
                        "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
  "aio": {"block_size": 65536, "thread_count": 2}, "activation_checkpointing": {},
  "tensorboard": {"enabled": true, "job_name": "\u00e4\n"},
  "ebb": {"micro_batches_per_round": "all", "coalesce": "4MiB", "host_memory": "1 GB",
          "offload_gradients": "device", "verify_swap": "all", "parameter_groups": {
      "no_decay": {"weight_decay": 0}, "b.c": {"optimizer": {"type": "SGD"}}}}, # end
})";

class Chance {
 public:
  explicit Chance(uint64_t seed) : generator_(seed) {}
  size_t Below(size_t end) { return std::uniform_int_distribution<size_t>(0, end - 1)(generator_); }

 private:
  std::mt19937_64 generator_;
};

// An error with a message of bounded length, or a Config.
absl::StatusOr<Config> Answer(const std::string& text, uint64_t seed) {
  absl::StatusOr<Config> config = Config::FromJson(text);
  if (!config.ok()) {
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << "seed " << seed;
    EXPECT_FALSE(config.status().message().empty()) << "seed " << seed;
    EXPECT_LT(config.status().message().size(), 2000u) << "seed " << seed;
  }
  return config;
}

// The answer; and a Config is valid and can be written and read again.
void Survives(const std::string& text, uint64_t seed) {
  const absl::StatusOr<Config> config = Answer(text, seed);
  if (!config.ok()) return;
  ASSERT_TRUE(config->Validate().ok()) << "seed " << seed << ": " << config->Validate() << "\n"
                                       << text;
  const absl::StatusOr<Config> read = Config::FromJson(config->ToJson());
  ASSERT_TRUE(read.ok()) << "seed " << seed << ": " << read.status();
  EXPECT_EQ(read->ToJson(), config->ToJson()) << "seed " << seed;
  (void)config->ForWorld(7);
}

TEST(Garbage, RichExampleIsAccepted) {
  const absl::StatusOr<Config> config = Config::FromJson(kRich);
  ASSERT_TRUE(config.ok()) << config.status();
}

TEST(Garbage, EveryPrefixIsAnswered) {
  const std::string rich = kRich;
  for (size_t length = 0; length < rich.size() - 1; ++length) {
    EXPECT_FALSE(Config::FromJson(rich.substr(0, length)).ok()) << length;
  }
}

TEST(Garbage, MutatedText) {
  const std::string rich = kRich;
  constexpr char kBytes[] = "{}[]\",:\\/*#\n .-+eE0159ntf\x00\x01\x7f\x80\xc3\xff";
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    Chance chance(seed);
    std::string text = rich;
    for (size_t i = 1 + chance.Below(4); i > 0; --i) {
      const size_t at = chance.Below(text.size());
      const char byte = kBytes[chance.Below(sizeof(kBytes))];
      switch (chance.Below(4)) {
        case 0:
          text[at] = byte;
          break;
        case 1:
          text.insert(at, 1, byte);
          break;
        case 2:
          text.erase(at, 1 + chance.Below(8));
          break;
        case 3:
          text.insert(at, text.substr(chance.Below(text.size()), chance.Below(40)));
          break;
      }
    }
    Survives(text, seed);
  }
}

TEST(Garbage, RandomBytes) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Chance chance(seed);
    std::string text(chance.Below(300), '\0');
    for (char& byte : text) byte = static_cast<char>(chance.Below(256));
    Survives(text, seed);
    Survives("{\"" + text, seed);
  }
}

// Well-formed, with every key of the table and values of every kind.
TEST(Garbage, EveryKeyWithEveryKindOfValue) {
  const char* const values[] = {"null",
                                "true",
                                "false",
                                "0",
                                "1",
                                "-1",
                                "3",
                                "0.5",
                                "5e8",
                                "1e300",
                                "-1e300",
                                "1e-320",
                                "9223372036854775807",
                                "18446744073709551615",
                                "1e19",
                                "\"\"",
                                "\"auto\"",
                                "\"all\"",
                                "\"none\"",
                                "\"fp16\"",
                                "\"1e3\"",
                                "\"\\u0000\"",
                                "[]",
                                "[0.1,0.2]",
                                "[[]]",
                                "{}",
                                "{\"enabled\":true}",
                                "{\"type\":\"SGD\"}",
                                "{\"x\":{\"y\":[{}]}}"};
  uint64_t number = 0;
  for (const config::Key& key : config::Keys()) {
    for (const char* value : values) {
      std::string text(value), path(key.path);
      for (size_t dot; (dot = path.rfind('.')) != std::string::npos; path.resize(dot)) {
        text = "{\"" + path.substr(dot + 1) + "\":" + text + "}";
      }
      const absl::StatusOr<Config> config = Answer("{\"" + path + "\":" + text + "}", number++);
      EXPECT_TRUE(!config.ok() || config->Validate().ok()) << path << " " << value;
    }
  }
}

// Random combinations of keys, so that relations between them are met with odd values, too.
TEST(Garbage, RandomCombinationsOfParameters) {
  const std::vector<std::string> values = {"0",         "1",       "0.5",      "2",
                                           "true",      "false",   "\"auto\"", "7e3",
                                           "[0.5,0.5]", "\"log\"", "null",     "-1"};
  const std::vector<std::string> types = {
      "WarmupLR",    "WarmupDecayLR", "WarmupCosineLR", "OneCycle",
      "LRRangeTest", "Adam",          "AdamW",          "SGD"};
  int accepted = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    Chance chance(seed);
    const bool is_optimizer = chance.Below(2) == 0;
    const std::string block = is_optimizer ? "optimizer" : "scheduler";
    const std::string type = types[is_optimizer ? 5 + chance.Below(3) : chance.Below(5)];
    std::string params;
    for (const config::Key& key : config::Keys()) {
      if (!key.path.starts_with(block + ".params.") || chance.Below(4) != 0) continue;
      if (!key.only_for.empty() && !config::HasWord(key.only_for, type)) continue;
      params += (params.empty() ? "\"" : ",\"") + std::string(key.path.substr(block.size() + 8)) +
                "\":" + values[chance.Below(values.size())];
    }
    const std::string text =
        "{\"" + block + "\":{\"type\":\"" + type + "\",\"params\":{" + params + "}}}";
    Survives(text, seed);
    accepted += Config::FromJson(text).ok() ? 1 : 0;
  }
  EXPECT_GT(accepted, 10) << "the combinations are too wild to test anything but refusals";
}

}  // namespace
}  // namespace ebb
