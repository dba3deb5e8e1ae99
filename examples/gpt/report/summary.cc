#include "report/summary.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "agreement.h"
#include "command_line/configuration.h"
#include "nlohmann/json.hpp"
#include "report/digest.h"
#include "report/tables.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

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
      "%.2f M parameters, %d %s (%s), stage %d, %s, %d tokens a step, %d bytes of text, %s%s",
      static_cast<double>(ParametersOf(trainer.model())) / 1e6, run.options.ranks,
      run.options.ranks == 1 ? "rank" : "ranks", trainer.device().description(), config.zero.stage,
      std::string(Name(config.compute)), trainer.tokens_per_step(), run.text.training_bytes(),
      RatesText(config), how.empty() ? "" : ", " + how);
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
    const int64_t own = ParametersOf(trainer.model()) / trainer.engine().program().shards();
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
