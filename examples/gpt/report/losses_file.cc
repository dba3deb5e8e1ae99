#include "report/losses_file.h"

#include <fstream>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/trace/log.h"
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

}  // namespace ebb::gpt
