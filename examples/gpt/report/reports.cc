#include "report/reports.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "agreement.h"
#include "command_line/configuration.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/runtime/trace/resident_set.h"
#include "ebb/runtime/trace/timeline.h"
#include "nlohmann/json.hpp"
#include "refusal.h"
#include "report/digest.h"
#include "report/tables.h"
#include "run.h"
#include "status_macros.h"
#include "trainer.h"

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

// Two reports may not be in the same place, and no report in place of an input. `places`: paths with
// their flags; null: of an input.
absl::Status CheckPlaces(const std::vector<std::pair<const char*, std::string>>& places) {
  std::vector<absl::Status> errors;
  for (auto place = places.begin(); place != places.end(); ++place) {
    const auto& [flag, path] = *place;
    if (flag == nullptr || path.empty()) continue;
    for (auto other = places.begin(); other != place; ++other) {
      if (!SameFile(path, other->second)) continue;
      errors.push_back(absl::InvalidArgumentError(
          other->first == nullptr
              ? absl::StrCat(flag, " would overwrite ", path, ", which is read")
              : absl::StrCat(other->first, " and ", flag, " name the same file, ", path)));
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

using Json = nlohmann::ordered_json;

// Rows as plain bytes, to be sent.
template <class Row>
struct Rows {
  Rows() = default;
  explicit Rows(const std::vector<Row>& from) : count(std::min(from.size(), rows.size())) {
    std::copy_n(from.begin(), count, rows.begin());
  }
  std::vector<Row> Vector() const { return {rows.begin(), rows.begin() + count}; }

  std::array<Row, 32> rows = {};
  std::ptrdiff_t count = 0;
};

struct UsageBytes {
  uint64_t Peak() const {
    return std::accumulate(memory.rows.begin(), memory.rows.end(), uint64_t{0},
                           [](uint64_t sum, const MemoryRow& row) { return sum + row.peak_bytes; });
  }

  Rows<MemoryRow> memory;
  Rows<CommunicationRow> communication;
  Rows<TrafficRow> traffic;
};

// Collective: on every rank, the usage of the rank with the highest peak of memory.
absl::StatusOr<RankUsage> FullestRank(const World& world, Engine& engine,
                                      const std::vector<TrafficRow>& traffic) {
  const std::vector<CommunicationRow> communication = engine.communication();
  GPT_ASSIGN_OR_RETURN(
      const std::vector<UsageBytes> all,
      GatherOnHost(world, "summary", engine.config().ebb.timeout_seconds,
                   UsageBytes{Rows(engine.memory()), Rows(communication), Rows(traffic)}));
  const UsageBytes& fullest = *std::max_element(
      all.begin(), all.end(),
      [](const UsageBytes& a, const UsageBytes& b) { return a.Peak() < b.Peak(); });
  RankUsage usage = {fullest.memory.Vector(), fullest.communication.Vector(),
                     fullest.traffic.Vector()};
  // Their names are literals of the engine, which every rank has in the same order.
  for (size_t i = 0; i < usage.communication.size(); ++i)
    usage.communication[i].operation = communication[i].operation;
  return usage;
}

CurveTitle TitleOf(const Run& run, const Trainer& trainer, const Config& config) {
  const GptShape& shape = run.options.shape;
  const std::vector<std::string>& data = run.options.data;
  const std::string more = data.size() > 1 ? absl::StrCat(" and ", data.size() - 1, " more") : "";
  return {.model = absl::StrFormat(
              "GPT, %.2f M parameters: %d layers, %d heads, width %d, context %d, %s",
              static_cast<double>(ParametersOf(trainer.model())) / 1e6, shape.layers, shape.heads,
              shape.width, shape.context, std::string(Name(config.compute))),
          .data = absl::StrCat(run.text.training_bytes(), " bytes of ",
                               data.empty() ? "text" : data.front(), more)};
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
  std::vector<std::pair<const char*, std::string>> places = {{nullptr, options.config_file}};
  for (const std::string& path : options.data) places.emplace_back(nullptr, path);
  places.insert(places.end(), {{"--losses", options.losses_file},
                               {"--curve", options.curve_file},
                               {"--summary", options.summary_file},
                               {timeline_flag, timeline}});
  GPT_RETURN_IF_ERROR(CheckPlaces(places));
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

std::string SummaryJson(const Summary& summary, const History& history) {
  Json json;
  json["version"] = summary.version;
  json["config"] = Json::parse(summary.config_json);
  json["ranks"] = summary.ranks;
  json["parameters"] = summary.parameters;
  json["steps"] = history.finished;
  json["resumed_after_steps"] = history.resumed;
  json["tokens_per_step"] = history.tokens_per_step;
  json["tokens_per_second"] = history.TokensPerSecond();
  json["skipped_steps"] = history.last.skipped_steps;
  json["stopped"] = nullptr;
  if (history.stopped) {
    json["stopped"] = {{"by", history.stopped->by},
                       {"during", history.stopped->during},
                       {"after_steps", history.stopped->steps}};
  }
  json["parameter_digest"] = summary.parameter_digest;
  if (!summary.products.empty()) json["products"] = summary.products;
  if (summary.graphs.most > 0) {
    json["cuda_graphs"] = {{"most", summary.graphs.most},
                           {"kept", summary.graphs.kept},
                           {"launches", summary.graphs.launches},
                           {"given_up", summary.graphs.given_up}};
  }
  Json& memory = json["memory"] = Json::array();
  for (const MemoryRow& row : summary.usage.memory) {
    memory.push_back({{"class", std::string(Name(row.state))},
                      {"tier", std::string(Name(row.tier))},
                      {"predicted_bytes", row.predicted_bytes},
                      {"peak_bytes", row.peak_bytes}});
  }
  Json& traffic = json["traffic"] = Json::array();
  for (const TrafficRow& row : summary.usage.traffic) {
    traffic.push_back({{"class", std::string(Name(row.state))},
                       {"tier", std::string(Name(row.tier))},
                       {"direction", std::string(Name(row.direction))},
                       {"predicted_bytes", row.predicted_bytes},
                       {"bytes", row.bytes}});
  }
  json["plan"] = {{"operations", summary.plan_operations}, {"bytes", summary.plan_bytes}};
  if (summary.resident) {
    json["resident"] = {{"before_bytes", summary.resident->before_bytes},
                        {"predicted_bytes", summary.resident->predicted_bytes},
                        {"peak_bytes", summary.resident->peak_bytes}};
  }
  json["traffic_is_steady"] = history.traffic_is_steady;
  Json& communication = json["communication"] = Json::array();
  for (const CommunicationRow& row : summary.usage.communication) {
    communication.push_back({{"operation", std::string(row.operation)},
                             {"predicted_bytes", row.predicted_bytes},
                             {"bytes", row.bytes}});
  }
  Json& held_out = json["held_out"] = Json::array();
  for (const Evaluated& e : history.held_out)
    held_out.push_back({{"step", e.step}, {"loss", e.loss}});
  for (const char* key : {"losses", "gradient_norms", "learning_rates"}) json[key] = Json::array();
  for (const StepRecord& record : history.steps) {
    json["losses"].push_back(record.report.loss);  // not a number: null
    json["gradient_norms"].push_back(record.report.gradient_norm);
    json["learning_rates"].push_back(record.report.learning_rate);
  }
  return json.dump(2) + "\n";
}

std::string Headline(Trainer& trainer, const Run& run, const std::string& how) {
  const Config& config = trainer.engine().config();
  return absl::StrFormat(
      "%.2f M parameters, %s (%s), stage %d, %s, %d tokens a step, %d bytes of text, %s%s",
      static_cast<double>(ParametersOf(trainer.model())) / 1e6, RanksText(run.options, config),
      trainer.device().description(), config.zero.stage, std::string(Name(config.compute)),
      trainer.tokens_per_step(), run.text.training_bytes(), RatesText(config),
      how.empty() ? "" : ", " + how);
}

absl::StatusOr<Summary> Summarize(const World& world, const Run& run, Trainer& trainer,
                                  const History& history) {
  Engine& engine = trainer.engine();
  GPT_ASSIGN_OR_RETURN(RankUsage usage, FullestRank(world, engine, history.traffic));
  std::string digest;
  if (!run.options.summary_file.empty()) {
    GPT_ASSIGN_OR_RETURN(digest, DigestOf(engine, trainer.model(), world.rank()));
  }
  return Summary{.config_json = engine.config().ToJson(),
                 .version = EBB_VERSION,
                 .parameters = ParametersOf(trainer.model()),
                 .ranks = run.options.ranks,
                 .usage = std::move(usage),
                 .plan_operations = engine.program().operations(),
                 .plan_bytes = engine.program().own_bytes(),
                 .resident = run.reports.resident->Row(),
                 .graphs = trainer.graphs(),
                 .products = trainer.product_letters(),
                 .parameter_digest = std::move(digest)};
}

absl::Status ReportRun(const Run& run, Trainer& trainer, const History& history,
                       const Summary& summary, Progress& progress) {
  const Config& config = trainer.engine().config();
  if (run.reports.curve) {
    const std::string svg = CurveSvg(history, TitleOf(run, trainer, config));
    GPT_RETURN_IF_ERROR(run.reports.curve->Write(svg));
  }
  if (run.reports.summary)
    GPT_RETURN_IF_ERROR(run.reports.summary->Write(SummaryJson(summary, history)));
  const RankUsage& usage = summary.usage;
  progress.Say("\nMemory of the fullest rank\n" + MemoryTable(usage.memory));
  if (!usage.traffic.empty()) {
    const int64_t own = ParametersOf(trainer.model()) / trainer.engine().program().shards() /
                        config.ebb.mesh.tensor;
    progress.Say((history.traffic_is_steady
                      ? "Traffic of a step\n"
                      : "Traffic of the last step; none in steady state, with its update and that "
                        "of the step before it applied, came before\n") +
                 TrafficTable(usage.traffic, config, own));
  }
  progress.Say(absl::StrFormat("%.0f tokens/s", history.TokensPerSecond()));
  return absl::OkStatus();
}

}  // namespace ebb::gpt
