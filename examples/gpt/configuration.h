// The configuration that a run of gpt has: a file's, or the recipe that holds without one, under what
// the command line overrides.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "options.h"

namespace ebb::gpt {

// Without --config; it also fills what a configuration leaves "auto".
struct Recipe {
  static constexpr int64_t kBatch = 4;
  static constexpr double kLearningRate = 8e-4;
  static int64_t Warmup(int64_t steps);  // updates
  static TrainerValues Values(const Options& options);
  static std::string Text();  // in words, for --help
};

// How a step's learning rate comes about, in words.
std::string RatesText(const Config& config);

// The file or the recipe, with the flags' overrides; not yet for a number of ranks.
absl::StatusOr<Config> OverriddenConfig(const Options& options);
// The configuration for these options' ranks, checked and complete. If nothing says how many ranks there
// are, there are as many as a file's batch sizes need.
absl::StatusOr<Config> ResolveConfig(const Options& options);
int RanksOf(const Config& resolved);

// How the options' configuration file is taken, as a table.
absl::StatusOr<std::string> ExplainConfig(const Options& options);

// Of the text generated at the end.
int64_t SampleBytes(const Options& options, const Config& config);

}  // namespace ebb::gpt
