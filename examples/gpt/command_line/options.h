// The options of `gpt`. A configuration file overrides the defaults, and options of the command
// line override both.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/base/tier.h"
#include "ebb/runtime/comm/launch/launch.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "model/model.h"

namespace ebb::gpt {

// kOperations: the tables, and the operations.
enum class ShowPlan : uint8_t { kNo, kTables, kOperations };
enum class CudaGraphs : uint8_t { kOff, kOn, kAuto };

inline constexpr int kRanksMax = 1024;
// Values of Options::products, beside letters of ProductChoice (ops/ops.h).
inline constexpr char kMeasuredProducts[] = "auto", kDefaultProducts[] = "default";

struct Options {
  static constexpr int64_t kSampleBytes = 300;

  std::string config_file;                  // empty: Recipe
  bool explain_config = false;              // print how the file is taken, and stop
  std::optional<UnknownKeys> unknown_keys;  // replaces the file's
  std::vector<std::string> data;            // empty: DefaultTextFiles
  GptShape shape = {.context = 64};
  int64_t steps = 400;
  bool steps_given = false;
  uint64_t seed = 1;
  int ranks = 2;
  bool ranks_given = false;
  int threads = 0;  // of one rank; 0: this machine's cores divided by its ranks
  std::string device = "cpu";
  CudaGraphs cuda_graphs = CudaGraphs::kAuto;
  std::string products = kMeasuredProducts;
  // Options that override the configuration.
  std::optional<int> stage;
  std::optional<double> learning_rate;
  std::optional<int64_t> warmup;                                      // steps
  std::optional<int64_t> batch, accumulate, micro_batches_per_round;  // 0 rounds: all
  std::optional<DType> dtype;
  std::optional<Tier> offload_param, offload_optimizer;
  std::vector<std::string> nvme_paths;                // empty: the configuration's
  std::optional<int64_t> device_memory, host_memory;  // bytes of a rank's pools
  bool split_master = false, stochastic_rounding = false;
  std::optional<int64_t> tensor;
  bool sequence_parallel = false;
  bool recompute = false;
  ShowPlan show_plan = ShowPlan::kNo;
  bool predict = false;
  int64_t evaluate_every = 0;           // steps; 0: only at the end
  std::optional<int64_t> sample_bytes;  // not given: kSampleBytes; with parameters on NVMe, 0
  std::string prompt = "The ";
  std::string save_folder;  // empty: nothing is saved
  int64_t save_every = 0;   // steps; 0: only at the end
  int64_t keep = 2;         // checkpoints; 0: all
  static constexpr char kLatest[] = "latest";
  std::string resume;         // a checkpoint, a folder of them, or kLatest
  std::string init_from;      // the source of initial values; empty: they are drawn at random
  std::string export_folder;  // empty: nothing is exported
  std::string losses_file, curve_file, trace_file, summary_file;  // empty: not written

  // True if nothing is trained: no ranks meet, no text is read, nothing is written.
  bool PlansOnly() const { return predict || (show_plan != ShowPlan::kNo && !steps_given); }
};

// Either options, or a text to print and the code to exit with: 0 after --help and --version, 2 for
// a wrong command line.
struct CommandLine {
  std::optional<Options> options;
  std::string text;
  int exit_code = 0;
};
CommandLine ParseCommandLine(int argc, const char* const* argv);

// Settles `ranks`: a launcher's number of processes, or the option's number of threads. If both are
// given and differ, it is an error.
absl::Status SettleRanks(const std::optional<Launch>& launch, Options& options);

// The device of the rank with this place on its host. kFailedPrecondition: it cannot be used.
absl::StatusOr<Device> ChooseDevice(const Options& options, int local_rank);

}  // namespace ebb::gpt
