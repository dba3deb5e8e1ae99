// gpt: trains a byte-level GPT-2 on text, with everything that Ebb does: ZeRO stages, offload,
// mixed precision, checkpoints, reports. docs/start.md explains the options.
//
//   build/release/bin/gpt --steps 500 --ranks 2          the ranks are threads of this process
//   torchrun --no-python --nproc-per-node 2 gpt          they are processes (also mpirun, srun)
//
// To read it top-down: Main in this file reads the options. RunRank (run.cc) runs one rank, from
// its engine to its reports. Trainer::Step (trainer.cc) runs a step, forward and backward through
// the engine's scopes. model/layers.h has the arithmetic of a layer.
//
// Exit codes: 0; 1 if training failed; 2 if the command line, the configuration or the launcher
// asked for something impossible, or if memory is too small; 75 if a signal ended the run and the
// run was saved; 130 if a signal ended it without a save.
#include <execinfo.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "command_line/configuration.h"
#include "command_line/options.h"
#include "data/text.h"
#include "ebb/runtime/comm/of_rank.h"
#include "ebb/runtime/trace/standard_streams.h"
#include "refusal.h"
#include "report/output.h"
#include "report/tables.h"
#include "run.h"
#include "saved_run.h"
#include "stop.h"

namespace ebb::gpt {
namespace {

constexpr int kFailed = 1, kUsageError = 2, kSaved = 75, kStopped = 130;

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "gpt: %s\n", std::string(status.message()).c_str());
  return code;
}

bool IsOneOfSeveral(const std::optional<Launch>& launch) {
  return launch && launch->size > 1;
}

int PrintAll(std::string_view text) {
  Print(text);
  const absl::Status printed = OutputError();
  return printed.ok() ? 0 : Fail(printed, kFailed);
}

// Among a launcher's processes only the first one prints. These processes do not connect.
int Plan(const std::optional<Launch>& launch, const Options& options) {
  const auto text = PlanningText(options);
  if (!text.ok()) return Fail(text.status(), kUsageError);
  return launch && launch->rank > 0 ? 0 : PrintAll(*text);
}

absl::StatusOr<Text> LoadText(Options& options) {
  if (options.data.empty()) {
    auto files = DefaultTextFiles();
    if (!files.ok()) return files.status();
    options.data = *std::move(files);
  }
  return OrOutOfMemory([&] { return Text::Load(options.data, options.shape.context); });
}

// If one rank refuses, the others may fail because it is gone.
int CodeOf(std::span<const absl::Status> errors) {
  return std::any_of(errors.begin(), errors.end(), IsRefusal) ? kUsageError : kFailed;
}

// `stopped`: RunRank's. A scheduler may start the same command again, because the saved run can be
// resumed.
int SayHowItEnded(const std::string& stopped, const Options& options, bool speaks) {
  if (stopped.empty()) return 0;
  const bool saved = !options.save_folder.empty();
  if (speaks)
    std::fprintf(stderr, "gpt: stopped by %s; %s\n", stopped.c_str(),
                 saved ? ("--resume latest goes on from the save in " + options.save_folder).c_str()
                       : "nothing was saved, as there is no --save");
  return saved ? kSaved : kStopped;
}

int RunRanksAsThreads(Options& options, const Config& config) {
  const auto text = LoadText(options);
  if (!text.ok()) return Fail(text.status(), kUsageError);
  auto reports = Reports::Open(options, config);
  if (!reports.ok()) return Fail(reports.status(), kUsageError);

  CatchStopSignals(/*before_time_is_up=*/!options.save_folder.empty());
  std::string stopped;
  std::vector<absl::Status> ended(static_cast<size_t>(options.ranks));
  const absl::Status status = RunThreads(options.ranks, [&](World world) {
    const auto result =
        RunRank(world, {.options = options, .config = config, .text = *text, .reports = *reports});
    if (result.ok() && world.rank() == 0) stopped = *result;
    return ended[world.rank()] = result.status();
  });
  if (!status.ok()) {
    // If all ranks have the same error, `status` would blame one of them.
    const bool alike =
        !ended[0].ok() && std::count(ended.begin(), ended.end(), ended[0]) == options.ranks;
    // A rank without a thread has not ended.
    return Fail(alike ? ended[0] : status, IsRefusal(status) ? kUsageError : CodeOf(ended));
  }
  return SayHowItEnded(stopped, options, /*speaks=*/true);
}

// Reports an error of this rank to the other ranks, which would otherwise wait for it.
int FailRank(const World& world, const absl::Status& status, int code) {
  world.Fail(status);
  return Fail(OfRank(world.rank(), status), code);
}

// The other ranks exit with 2 as well, because the code of their error is a refusal's.
int RefuseRank(const World& world, const absl::Status& status) {
  return FailRank(world, absl::FailedPreconditionError(status.message()), kUsageError);
}

// The other ranks may have been asked for something possible, because each has its own command line
// and each host its own files. So this rank connects all the same, and reports its error to them.
int RefuseBeforeMeeting(const std::optional<Launch>& launch, const absl::Status& status) {
  if (!IsOneOfSeveral(launch)) return Fail(status, kUsageError);
  Fail(OfRank(launch->rank, status), kUsageError);  // now, because the others may never come
  EndOnStopSignals(kUsageError, /*before_time_is_up=*/false);
  if (const auto world = World::FromEnvironment(); world.ok())
    world->Fail(absl::FailedPreconditionError(status.message()));
  return kUsageError;
}

int RunRankOfLauncher(Options& options, const Config& config) {
  const auto world = World::FromEnvironment({.timeout_seconds = config.ebb.timeout_seconds});
  if (!world.ok()) {
    const bool refused = IsRefusal(RefusalByCode(world.status()));
    return Fail(world.status(), refused ? kUsageError : kFailed);
  }
  const auto text = LoadText(options);
  if (!text.ok()) return RefuseRank(*world, text.status());
  auto reports = world->rank() == 0 ? Reports::Open(options, config) : Reports();
  if (!reports.ok()) return RefuseRank(*world, reports.status());
  CatchStopSignals(/*before_time_is_up=*/!options.save_folder.empty());
  const auto stopped =
      RunRank(*world, {.options = options, .config = config, .text = *text, .reports = *reports});
  if (!stopped.ok())
    return FailRank(*world, stopped.status(), CodeOf(std::span(&stopped.status(), 1)));
  return SayHowItEnded(*stopped, options, world->rank() == 0);
}

int Main(int argc, char** argv) {
  CommandLine command = ParseCommandLine(argc, argv);
  if (!command.options && command.exit_code == 0) return PrintAll(command.text);
  const auto launch = DescribeLaunch(ThisEnvironment());
  if (!command.options) {
    return RefuseBeforeMeeting(launch.ok() ? *launch : std::nullopt,
                               absl::InvalidArgumentError(command.text));
  }
  Options& options = *command.options;
  if (options.explain_config) {
    const auto explained = ExplainConfig(options);
    if (!explained.ok()) return Fail(explained.status(), kUsageError);
    return PrintAll(*explained);
  }
  if (!launch.ok()) return Fail(launch.status(), kUsageError);
  if (const auto status = SettleRanks(*launch, options); !status.ok())
    return RefuseBeforeMeeting(options.PlansOnly() ? std::nullopt : *launch, status);
  if (options.PlansOnly()) return Plan(*launch, options);
  // A run with --save has lost nothing if its time is up before training begins.
  const bool saves = !options.save_folder.empty();
  EndOnStopSignals(saves ? kSaved : kStopped, /*before_time_is_up=*/saves);
  const auto config = ResolveConfig(options);
  if (const auto status = AllOf({config.status(), CheckSave(options), CheckExport(options)});
      !status.ok())
    return RefuseBeforeMeeting(*launch, status);
  options.ranks = RanksOf(*config);
  return IsOneOfSeveral(*launch) ? RunRankOfLauncher(options, *config)
                                 : RunRanksAsThreads(options, *config);
}

}  // namespace
}  // namespace ebb::gpt

int main(int argc, char** argv) {
  // Otherwise the first files that are opened take their descriptors.
  ebb::OpenMissingStandardStreams();
  // Before there are threads, and before the driver starts: docs/ranks.md, "Queues of a GPU".
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  // A file beyond the limit of its size (ulimit -f) is an error with a message then, and not the
  // end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  // The C library opens libgcc when an exception first passes one of its own functions, as
  // std::bad_alloc does in a library that calls pthread_once. The library aborts if it lacks memory
  // for libgcc. A stack trace opens it too.
  void* caller = nullptr;
  backtrace(&caller, 1);
  const auto code =
      ebb::gpt::OrOutOfMemory([&]() -> absl::StatusOr<int> { return ebb::gpt::Main(argc, argv); });
  return code.ok() ? *code : ebb::gpt::Fail(code.status(), ebb::gpt::kUsageError);
}
