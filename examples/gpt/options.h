// What `gpt` was asked to do: flags over a configuration file over defaults.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "model.h"

namespace ebb::gpt {

struct Options {
  std::string config_file;        // empty: DefaultConfig
  std::vector<std::string> data;  // empty: DefaultTextFiles
  GptShape shape;
  int64_t steps = 200;
  bool steps_given = false;
  uint64_t seed = 1;
  int ranks = 2;
  int threads = 0;           // of one rank; 0: this machine's cores over the ranks
  std::optional<int> stage;  // these three override the configuration
  std::optional<int64_t> batch;
  std::optional<DType> dtype;
  bool recompute = false;
  bool show_plan = false;
  int64_t evaluate_every = 0;  // steps; 0: only at the end
  int64_t sample_bytes = 300;
  std::string prompt = "The ";
  std::string losses_file, curve_file, trace_file, summary_file;  // empty: not written
};

// Either options, or a text to print and the code to exit with: 0 after --help, 2 for a wrong
// command line.
struct CommandLine {
  std::optional<Options> options;
  std::string text;
  int exit_code = 0;
};
CommandLine ParseCommandLine(int argc, const char* const* argv);

// The configuration for these options' ranks: the file or the default, with the flags' overrides,
// checked and complete.
absl::StatusOr<Config> ResolveConfig(const Options& options);

// Threads of one rank: the option, or an equal share of the cores, at least one.
int ThreadsPerRank(const Options& options);

}  // namespace ebb::gpt
