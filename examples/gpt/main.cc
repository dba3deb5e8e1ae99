// gpt: trains a byte-level GPT on threads as ranks. Exit codes: 0; 1 if training failed; 2 for what
// the command line asked that cannot be; 130 if a signal ended it.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <vector>

#include "options.h"
#include "run.h"
#include "stop.h"
#include "text.h"

namespace {

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "gpt: %s\n", std::string(status.message()).c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace ebb::gpt;  // the program's own
  CommandLine command = ParseCommandLine(argc, argv);
  if (!command.options) {
    std::fputs(command.text.c_str(), command.exit_code == 0 ? stdout : stderr);
    return command.exit_code;
  }
  Options& options = *command.options;
  const auto config = ResolveConfig(options);
  if (!config.ok()) return Fail(config.status(), 2);
  if (options.data.empty()) {
    auto files = DefaultTextFiles();
    if (!files.ok()) return Fail(files.status(), 2);
    options.data = *std::move(files);
  }
  const auto text = Text::Load(options.data, options.shape.context);
  if (!text.ok()) return Fail(text.status(), 2);
  auto reports = Reports::Open(options, *config);
  if (!reports.ok()) return Fail(reports.status(), 2);

  CatchStopSignals();
  std::atomic<bool> stopped{false};
  std::vector<absl::Status> ended(static_cast<size_t>(options.ranks));
  const absl::Status status = ebb::RunThreads(options.ranks, [&](ebb::World world) {
    const auto result =
        RunRank(world, {.options = options, .config = *config, .text = *text, .reports = *reports});
    if (result.ok() && *result) stopped = true;
    return ended[static_cast<size_t>(world.rank())] = result.status();
  });
  if (!status.ok()) {
    // Where all ranks have the same to say, `status` would put it down to one.
    const bool alike =
        !ended[0].ok() && std::count(ended.begin(), ended.end(), ended[0]) == options.ranks;
    return Fail(alike ? ended[0] : status, 1);
  }
  return stopped ? 130 : 0;
}
