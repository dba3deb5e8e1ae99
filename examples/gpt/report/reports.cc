#include "report/reports.h"

#include <array>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/timeline.h"

namespace ebb::gpt {
namespace {

// A file that is not regular (/dev/stdout, a pipe) may take several reports.
bool SameFile(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::exists(a, error) && !fs::is_regular_file(a, error)) return false;
  const auto place = [&](const std::string& path) {
    fs::path found = fs::weakly_canonical(fs::absolute(path, error), error);
    return error ? fs::path(path) : found;
  };
  return place(a) == place(b);
}

}  // namespace

absl::StatusOr<Reports> Reports::Open(const Options& options, const Config& config) {
  Reports reports;
  struct Wanted {
    const char* flag;
    const std::string& path;
    std::optional<OutputFile>* file;  // null: the timeline
  };
  const std::array all = {
      Wanted{"--losses", options.losses_file, &reports.losses},
      Wanted{"--curve", options.curve_file, &reports.curve},
      Wanted{"--summary", options.summary_file, &reports.summary},
      // Last, because it replaces an older timeline by an empty one.
      Wanted{options.trace_file.empty() ? "ebb.trace" : "--trace", config.ebb.trace, nullptr}};
  std::vector<std::string> inputs = options.data;
  if (!options.config_file.empty()) inputs.push_back(options.config_file);
  for (auto wanted = all.begin(); wanted != all.end(); ++wanted) {
    if (wanted->path.empty()) continue;
    for (auto other = all.begin(); other != wanted; ++other) {
      if (!SameFile(wanted->path, other->path)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(other->flag, " and ", wanted->flag, " name the same file, ", wanted->path));
    }
    for (const std::string& input : inputs) {
      if (!SameFile(wanted->path, input)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(wanted->flag, " would overwrite ", input, ", which is read"));
    }
    if (wanted->file == nullptr) {
      const absl::Status made = Timeline::Create(wanted->path);
      if (!made.ok())
        return absl::Status(made.code(), absl::StrCat(wanted->flag, ": ", made.message()));
      continue;
    }
    auto file = OutputFile::Open(wanted->flag, wanted->path);
    if (!file.ok()) return file.status();
    wanted->file->emplace(*std::move(file));
  }
  return reports;
}

}  // namespace ebb::gpt
