#include "report/reports.h"

#include <array>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/timeline.h"
#include "refusal.h"
#include "status_macros.h"

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
    std::function<absl::Status(const Wanted&)> open;
  };
  const auto opens = [](std::optional<OutputFile>& into) {
    return [&into](const Wanted& wanted) -> absl::Status {
      GPT_ASSIGN_OR_RETURN(OutputFile file, OutputFile::Open(wanted.flag, wanted.path));
      into.emplace(std::move(file));
      return absl::OkStatus();
    };
  };
  const auto opens_losses = [&](const Wanted& wanted) -> absl::Status {
    GPT_ASSIGN_OR_RETURN(LossesFile file, LossesFile::Open(wanted.path));
    reports.losses.emplace(std::move(file));
    return absl::OkStatus();
  };
  std::vector<absl::Status> errors;
  const auto makes_timeline = [&](const Wanted& wanted) -> absl::Status {
    if (!AllOf(errors).ok()) return absl::OkStatus();  // it replaces an older timeline
    const absl::Status made = Timeline::Create(wanted.path);
    return absl::Status(made.code(), absl::StrCat(wanted.flag, ": ", made.message()));
  };
  const std::array all = {Wanted{"--losses", options.losses_file, opens_losses},
                          Wanted{"--curve", options.curve_file, opens(reports.curve)},
                          Wanted{"--summary", options.summary_file, opens(reports.summary)},
                          Wanted{options.trace_file.empty() ? "ebb.trace" : "--trace",
                                 config.ebb.trace, makes_timeline}};
  std::vector<std::string> inputs = options.data;
  if (!options.config_file.empty()) inputs.push_back(options.config_file);
  for (auto wanted = all.begin(); wanted != all.end(); ++wanted) {
    if (wanted->path.empty()) continue;
    for (auto other = all.begin(); other != wanted; ++other) {
      if (!SameFile(wanted->path, other->path)) continue;
      errors.push_back(absl::InvalidArgumentError(
          absl::StrCat(other->flag, " and ", wanted->flag, " name the same file, ", wanted->path)));
    }
    for (const std::string& input : inputs) {
      if (!SameFile(wanted->path, input)) continue;
      errors.push_back(absl::InvalidArgumentError(
          absl::StrCat(wanted->flag, " would overwrite ", input, ", which is read")));
    }
  }
  GPT_RETURN_IF_ERROR(AllOf(errors));
  for (const Wanted& wanted : all)
    if (!wanted.path.empty()) errors.push_back(wanted.open(wanted));
  GPT_RETURN_IF_ERROR(AllOf(errors));
  return reports;
}

}  // namespace ebb::gpt
