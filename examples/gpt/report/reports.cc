#include "report/reports.h"

#include <filesystem>
#include <fstream>
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

// Two reports may not be in the same place, and no report in place of an input. `reports`: flags
// and paths.
absl::Status CheckPlaces(const std::vector<std::pair<const char*, std::string>>& reports,
                         const Options& options) {
  std::vector<std::string> inputs = options.data;
  if (!options.config_file.empty()) inputs.push_back(options.config_file);
  std::vector<absl::Status> errors;
  for (auto report = reports.begin(); report != reports.end(); ++report) {
    const auto& [flag, path] = *report;
    if (path.empty()) continue;
    for (auto other = reports.begin(); other != report; ++other) {
      if (!SameFile(path, other->second)) continue;
      errors.push_back(absl::InvalidArgumentError(
          absl::StrCat(other->first, " and ", flag, " name the same file, ", path)));
    }
    for (const std::string& input : inputs) {
      if (!SameFile(path, input)) continue;
      errors.push_back(absl::InvalidArgumentError(
          absl::StrCat(flag, " would overwrite ", input, ", which is read")));
    }
  }
  return AllOf(errors);
}

template <class File>
absl::Status Take(absl::StatusOr<File> opened, std::optional<File>& into) {
  if (!opened.ok()) return opened.status();
  into.emplace(*std::move(opened));
  return absl::OkStatus();
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
  const std::string& timeline = config.ebb.trace;
  const char* const timeline_flag = options.trace_file.empty() ? "ebb.trace" : "--trace";
  GPT_RETURN_IF_ERROR(CheckPlaces({{"--losses", options.losses_file},
                                   {"--curve", options.curve_file},
                                   {"--summary", options.summary_file},
                                   {timeline_flag, timeline}},
                                  options));
  Reports reports;
  std::vector<absl::Status> errors;
  if (!options.losses_file.empty())
    errors.push_back(Take(LossesFile::Open(options.losses_file), reports.losses));
  if (!options.curve_file.empty())
    errors.push_back(Take(OutputFile::Open("--curve", options.curve_file), reports.curve));
  if (!options.summary_file.empty())
    errors.push_back(Take(OutputFile::Open("--summary", options.summary_file), reports.summary));
  if (!timeline.empty() && AllOf(errors).ok()) {  // it replaces an older timeline
    const absl::Status made = Timeline::Create(timeline);
    errors.emplace_back(made.code(), absl::StrCat(timeline_flag, ": ", made.message()));
  }
  GPT_RETURN_IF_ERROR(AllOf(errors));
  return reports;
}

}  // namespace ebb::gpt
