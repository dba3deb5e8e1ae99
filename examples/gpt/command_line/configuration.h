// The configuration of a gpt run: a file's, or without a file the recipe's. Options of the command
// line override either.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "command_line/options.h"
#include "ebb/runtime/config/config.h"

namespace ebb::gpt {

// Used without --config. It also fills the "auto" values of a configuration.
struct Recipe {
  static constexpr int64_t kBatch = 4;
  static constexpr double kLearningRate = 8e-4;
  static int64_t Warmup(int64_t steps);  // updates
  static TrainerValues Values(const Options& options);
  static std::string Text();  // in words, for --help
};

// How a step's learning rate is computed, in words.
std::string RatesText(const Config& config);

// The file or the recipe, with the flags' overrides, before the number of ranks is known. An error
// has all that is wrong, also with what ResolveConfig looks at.
absl::StatusOr<Config> OverriddenConfig(const Options& options);
// The configuration for these options' ranks, checked and complete. If nothing gives the number of
// ranks, there are as many as a file's batch sizes need.
absl::StatusOr<Config> ResolveConfig(const Options& options);
int RanksOf(const Config& resolved);
// "4 ranks", and if they are not all data ranks, "4 ranks: 2 data x 2 tensor".
std::string RanksText(const Options& options, const Config& config);
// The part of a rank's RAM that saves and loads need beside the pools.
int64_t CheckpointBytes(const Options& options);

// How the options' configuration file is taken, as a table.
absl::StatusOr<std::string> ExplainConfig(const Options& options);

}  // namespace ebb::gpt
