#include "report/reports.h"

#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/runtime/trace/resident_set.h"
#include "ebb/runtime/trace/timeline.h"
#include "refusal.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

constexpr char kFlag[] = "--losses";
constexpr size_t kRoom = 64 << 10;  // bytes, of about a thousand lines
constexpr std::string_view kHeader =
    "step,loss,gradient_norm,learning_rate,loss_scale,applied,tokens_per_second\n";

absl::Status NotLosses(const std::string& path, int64_t line) {
  return absl::InvalidArgumentError(
      absl::StrCat(kFlag, " ", path, ": line ", line,
                   " is not of a CSV of losses, and the file would be overwritten; name another "
                   "file, or remove this one"));
}

// Empty at the end of the file, where a line may be cut off.
std::string WholeLine(std::istream& file) {
  std::string line;
  return std::getline(file, line) && !file.eof() ? line + "\n" : "";
}

// Where the lines of the first `finished` steps end; 0 without a whole header. Warns of missing
// lines.
absl::StatusOr<int64_t> EndOfSteps(const std::string& path, int64_t finished) {
  std::ifstream file(path, std::ios::binary);
  int64_t end = 0, number = 0, last = 0;
  for (std::string line = WholeLine(file); !line.empty(); line = WholeLine(file)) {
    int64_t step = 0;
    if (++number > 1 && !absl::SimpleAtoi(line.substr(0, line.find(',')), &step))
      return NotLosses(path, number);
    if (step > finished) break;
    end += std::ssize(line);
    last = step;
  }
  if (last < finished) {
    LogWarning(absl::StrCat(kFlag, " ", path, " has no lines of steps ", last + 1, " to ", finished,
                            ", which the checkpoint has"));
  }
  return end;
}

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

absl::StatusOr<LossesFile> LossesFile::Open(const std::string& path) {
  GPT_ASSIGN_OR_RETURN(OutputFile file, OutputFile::OpenToAppend(kFlag, path));
  if (!file.is_direct()) {
    std::string begin(kHeader.size(), '\0');
    std::ifstream in(path, std::ios::binary);
    in.read(begin.data(), std::ssize(begin));
    begin.resize(static_cast<size_t>(in.gcount()));
    if (!kHeader.starts_with(begin)) return NotLosses(path, 1);
  }
  return LossesFile(std::move(file));
}

absl::Status LossesFile::Begin(int64_t finished) {
  int64_t kept = 0;
  if (!file_.is_direct()) {
    if (finished > 0) {
      GPT_ASSIGN_OR_RETURN(kept, EndOfSteps(file_.path(), finished));
    }
    GPT_RETURN_IF_ERROR(file_.CutAt(kept));
    // On a disk that is still full each start would train a few steps, and stop.
    GPT_RETURN_IF_ERROR(file_.Append(std::string(kRoom, '\0')));
    GPT_RETURN_IF_ERROR(file_.Sync());
    GPT_RETURN_IF_ERROR(file_.CutAt(kept));
  }
  return kept > 0 ? absl::OkStatus() : file_.Append(kHeader);
}

absl::Status LossesFile::Add(const StepRecord& record, int64_t tokens_per_step) {
  const StepReport& r = record.report;
  absl::StrAppendFormat(&pending_, "%d,%.9g,%.9g,%.9g,%.9g,%d,%.1f\n", r.step, r.loss,
                        r.gradient_norm, r.learning_rate, r.loss_scale, r.applied,
                        static_cast<double>(tokens_per_step) / record.seconds);
  return WritePending();
}

absl::Status LossesFile::WritePending() {
  GPT_RETURN_IF_ERROR(file_.Append(pending_));
  pending_.clear();
  return absl::OkStatus();
}

absl::Status LossesFile::Sync() {
  GPT_RETURN_IF_ERROR(WritePending());
  return file_.Sync();
}

ResidentMemory::ResidentMemory() {
  if (const std::optional<ResidentSet> now = ReadResidentSet()) before_bytes_ = now->bytes;
}

void ResidentMemory::Add(const Engine& engine, DeviceKind device) {
  int64_t bytes = engine.program().own_bytes();
  for (const MemoryRow& row : engine.memory()) {
    if (row.tier == Tier::kCpu || (row.tier == Tier::kDevice && device == DeviceKind::kCpu))
      bytes += static_cast<int64_t>(row.predicted_bytes);
  }
  engines_bytes_ += bytes;
}

std::optional<ResidentRow> ResidentMemory::Row() const {
  const std::optional<ResidentSet> now = ReadResidentSet();
  if (!before_bytes_ || !now) return std::nullopt;
  return ResidentRow{.before_bytes = *before_bytes_,
                     .predicted_bytes = *before_bytes_ + engines_bytes_,
                     .peak_bytes = now->peak_bytes};
}

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
