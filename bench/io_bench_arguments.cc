#include "io_bench_arguments.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/config.h"

namespace ebb::bench {
namespace {

// Users paste the output into a configuration, so a configuration must allow these values.
absl::Status CheckAio(const Arguments& arguments) {
  Config config;
  if (arguments.block_bytes > 0) config.aio.block_size = arguments.block_bytes;
  if (arguments.depth > 0) config.aio.queue_depth = arguments.depth;
  return config.Validate();
}

}  // namespace

std::optional<int> Parse(int argc, char** argv, Arguments& arguments) {
  CLI::App app(
      "Finds good aio settings for a path: measures reads and writes past the page cache, in files "
      "without\n"
      "a name, and prints the JSON to put into the configuration.");
  app.add_option("PATH", arguments.path, "directory on the disk to measure, as for nvme_path")
      ->required()
      ->check(CLI::ExistingDirectory);  // a new folder may be on the wrong disk
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 50);
  const CLI::Validator measurable(
      [](std::string& text) -> std::string {
        int64_t bytes = 0;
        if (absl::SimpleAtoi(text, &bytes) && bytes >= kBytesMin && bytes <= int64_t{1} << 50)
          return "";
        return absl::StrCat("is too little or too much to measure: ", text,
                            " bytes; from 1 MiB to 1 PiB");
      },
      "");
  const CLI::Validator duration(
      [](std::string& text) -> std::string {
        double seconds = 0;
        if (absl::SimpleAtod(text, &seconds) && seconds >= 0 && seconds <= 86400) return "";
        return absl::StrCat("is not a number of seconds from 0 to 86400: ", text);
      },
      "");
  app.add_option(
         "--bytes", arguments.bytes,
         "size of each file (such as 1GiB), 1 MiB or more, up to six at a time; default up to "
         "512 MiB")
      ->transform(CLI::AsSizeValue(false))
      ->check(measurable);
  app.add_option("--seconds", arguments.seconds, "how long to measure, about")
      ->check(duration)
      ->capture_default_str();
  app.add_option("--block-size", arguments.block_bytes, "bytes of a request; default: found")
      ->transform(CLI::AsSizeValue(false))
      ->check(positive);
  app.add_option("--queue-depth", arguments.depth, "requests in flight; default: found")
      ->check(positive);
  app.add_option("--files", arguments.files,
                 "files to stripe over, each with the queue depth; default: found")
      ->check(CLI::Range(int64_t{1}, int64_t{16}));
  app.add_flag("--json", arguments.json_only,
               "print only one line of JSON, with the rates in bytes per second");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::fprintf(stderr, "io_bench: %s (see --help)\n", error.what());
    return kUsageError;
  }
  if (const absl::Status status = CheckAio(arguments); !status.ok()) {
    std::fprintf(stderr, "io_bench: %s\n", std::string(status.message()).c_str());
    return kUsageError;
  }
  return std::nullopt;
}

}  // namespace ebb::bench
