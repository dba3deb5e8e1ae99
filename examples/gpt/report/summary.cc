#include "report/summary.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "report/mebibytes.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kRowsMax = 32;

// A rank's usage as plain bytes, to be sent. Names of operations are literals of the engine, and
// the receiver has the same ones in the same order.
struct UsageBytes {
  std::array<MemoryRow, kRowsMax> memory;
  std::array<uint64_t, kRowsMax> predicted, moved;
  std::array<TrafficRow, kRowsMax> traffic;
  size_t memory_rows = 0, communication_rows = 0, traffic_rows = 0;
};

uint64_t PeakOf(const UsageBytes& usage) {
  uint64_t peak = 0;
  for (size_t i = 0; i < usage.memory_rows; ++i) peak += usage.memory[i].peak_bytes;
  return peak;
}

}  // namespace

absl::StatusOr<RankUsage> FullestRank(const World& world, Engine& engine,
                                      const std::vector<TrafficRow>& traffic) {
  const std::vector<MemoryRow> memory = engine.memory();
  std::vector<CommunicationRow> communication = engine.communication();
  UsageBytes mine = {};
  mine.memory_rows = std::min(memory.size(), kRowsMax);
  mine.communication_rows = std::min(communication.size(), kRowsMax);
  mine.traffic_rows = std::min(traffic.size(), kRowsMax);
  std::copy_n(memory.begin(), mine.memory_rows, mine.memory.begin());
  std::copy_n(traffic.begin(), mine.traffic_rows, mine.traffic.begin());
  for (size_t i = 0; i < mine.communication_rows; ++i) {
    mine.predicted[i] = communication[i].predicted_bytes;
    mine.moved[i] = communication[i].bytes;
  }

  std::vector<UsageBytes> all(static_cast<size_t>(world.size()));
  GPT_ASSIGN_OR_RETURN(
      Communicator communicator,
      world.NewCommunicator(
          {.name = "summary", .timeout_seconds = engine.config().ebb.timeout_seconds}));
  Stream stream = Device::Cpu().CallerStream();
  const CollectiveSpan span = {.send = &mine, .receive = all.data(), .count = sizeof(UsageBytes)};
  GPT_RETURN_IF_ERROR(communicator.AllGather(stream, {&span, 1}, DType::kInt8));
  stream.WaitIdle();
  GPT_RETURN_IF_ERROR(communicator.status());

  const auto less = [](const UsageBytes& a, const UsageBytes& b) { return PeakOf(a) < PeakOf(b); };
  const UsageBytes& fullest = *std::max_element(all.begin(), all.end(), less);
  communication.resize(fullest.communication_rows);
  for (size_t i = 0; i < fullest.communication_rows; ++i) {
    communication[i].predicted_bytes = fullest.predicted[i];
    communication[i].bytes = fullest.moved[i];
  }
  return RankUsage{
      .memory = {fullest.memory.begin(),
                 fullest.memory.begin() + static_cast<int64_t>(fullest.memory_rows)},
      .communication = std::move(communication),
      .traffic = {fullest.traffic.begin(),
                  fullest.traffic.begin() + static_cast<int64_t>(fullest.traffic_rows)}};
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

std::string MemoryTable(const std::vector<MemoryRow>& rows, bool counted) {
  std::string table = absl::StrFormat("%-12s %-8s %14s", "class", "tier", "predicted MiB");
  if (counted) absl::StrAppendFormat(&table, " %14s", "peak MiB");
  table += "\n";
  const auto append = [&](std::string_view what, Tier tier, uint64_t predicted, uint64_t peak) {
    absl::StrAppendFormat(&table, "%-12s %-8s %14.2f", std::string(what), std::string(Name(tier)),
                          static_cast<double>(predicted) / kMebi);
    if (counted) absl::StrAppendFormat(&table, " %14.2f", static_cast<double>(peak) / kMebi);
    table += "\n";
  };
  std::array<uint64_t, kTiers> predicted = {}, peak = {};
  std::string driver;
  for (const MemoryRow& row : rows) {
    if (row.state == StateClass::kDriver) {  // measured; the sums compare predicted rows
      if (counted) {
        driver = absl::StrFormat("%-12s %-8s %14s %14.2f\n", std::string(Name(row.state)),
                                 std::string(Name(row.tier)), "-",
                                 static_cast<double>(row.peak_bytes) / kMebi);
      }
      continue;
    }
    append(Name(row.state), row.tier, row.predicted_bytes, row.peak_bytes);
    predicted[static_cast<int>(row.tier)] += row.predicted_bytes;
    peak[static_cast<int>(row.tier)] += row.peak_bytes;
  }
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    const size_t at = static_cast<size_t>(tier);
    if (predicted[at] + peak[at] > 0) append("all", tier, predicted[at], peak[at]);
  }
  return table + driver;
}

}  // namespace ebb::gpt
