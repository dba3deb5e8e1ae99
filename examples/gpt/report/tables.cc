#include "report/tables.h"

#include <array>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ebb::gpt {
namespace {

std::string Place(std::string_view what, std::string_view tier) {
  return absl::StrFormat("%-12s %-8s", std::string(what), std::string(tier));
}
std::string Heading(const char* text) {
  return absl::StrFormat(" %14s", text);
}
std::string Mebibytes(uint64_t bytes) {
  return absl::StrFormat(" %14.2f", static_cast<double>(bytes) / kMebi);
}

bool SchemesApply(const Config& config) {
  // Optimizers with two states.
  const OptimizerType type = config.optimizer.type;
  return config.compute != DType::kFloat32 &&
         (type == OptimizerType::kAdam || type == OptimizerType::kAdamW) &&
         (config.parameter_tier() == Tier::kNvme || config.optimizer_tier() == Tier::kNvme);
}

}  // namespace

std::string MemoryTable(const std::vector<MemoryRow>& rows, bool counted) {
  const auto line = [&](const std::string& place, const std::string& predicted,
                        const std::string& peak) {
    return absl::StrCat(place, predicted, counted ? peak : "", "\n");
  };
  std::string table = line(Place("class", "tier"), Heading("predicted MiB"), Heading("peak MiB"));
  std::array<uint64_t, kTiers> predicted = {}, peak = {};
  std::string driver;
  for (const MemoryRow& row : rows) {
    const std::string place = Place(Name(row.state), Name(row.tier));
    if (row.state == StateClass::kDriver) {  // measured; the sums compare predicted rows
      if (counted) driver = line(place, Heading("-"), Mebibytes(row.peak_bytes));
      continue;
    }
    table += line(place, Mebibytes(row.predicted_bytes), Mebibytes(row.peak_bytes));
    predicted[static_cast<int>(row.tier)] += row.predicted_bytes;
    peak[static_cast<int>(row.tier)] += row.peak_bytes;
  }
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    const size_t at = static_cast<size_t>(tier);
    if (predicted[at] + peak[at] > 0)
      table += line(Place("all", Name(tier)), Mebibytes(predicted[at]), Mebibytes(peak[at]));
  }
  return table + driver;
}

std::string TrafficTable(const std::vector<TrafficRow>& rows, const Config& config,
                         int64_t parameters, bool counted) {
  std::string table = absl::StrCat(Place("class", "tier"), absl::StrFormat(" %-9s", "direction"),
                                   Heading("predicted MiB"), counted ? Heading("MiB") : "");
  absl::StrAppendFormat(&table, " %20s\n", "bytes a parameter");
  double read = 0, written = 0;  // on NVMe, a parameter
  for (const TrafficRow& row : rows) {
    const double each = static_cast<double>(counted ? row.bytes : row.predicted_bytes) /
                        static_cast<double>(parameters);
    absl::StrAppend(&table, Place(Name(row.state), Name(row.tier)),
                    absl::StrFormat(" %-9s", std::string(Name(row.direction))),
                    Mebibytes(row.predicted_bytes), counted ? Mebibytes(row.bytes) : "");
    absl::StrAppendFormat(&table, " %20.2f\n", each);
    if (row.tier == Tier::kNvme) (row.direction == Direction::kRead ? read : written) += each;
  }
  if (read + written == 0) return table;
  absl::StrAppendFormat(&table, "NVMe, bytes a parameter and step: %.2f (read %.2f, written %.2f)",
                        read + written, read, written);
  if (const auto least = LeastBytes(config))
    absl::StrAppendFormat(&table, "; least possible with nothing in RAM %g", *least);
  if (const auto deepspeed = DeepSpeedBytes(config))
    absl::StrAppendFormat(&table, "; DeepSpeed's scheme %g", *deepspeed);
  return table + "\n";
}

std::string CommunicationTable(const std::vector<CommunicationRow>& rows) {
  std::string table =
      absl::StrCat(absl::StrFormat("%-16s", "operation"), Heading("predicted MiB"), "\n");
  for (const CommunicationRow& row : rows)
    absl::StrAppend(&table, absl::StrFormat("%-16s", row.operation), Mebibytes(row.predicted_bytes),
                    "\n");
  return table;
}

std::optional<double> LeastBytes(const Config& config) {
  if (!SchemesApply(config)) return std::nullopt;
  const bool has_parameters = config.parameter_tier() == Tier::kNvme;
  const bool has_states = config.optimizer_tier() == Tier::kNvme;
  const bool splits = config.compute == DType::kBFloat16;
  const double master = config.ebb.stochastic_rounding ? 0 : splits ? 2 : 4;
  const double states = has_states ? 2 * (master + 8) : 0;
  // The update reads whole masters, and one of the two visits takes its parameters from them.
  const double parameters = !has_parameters ? 0 : has_states && !splits ? 2 + 2 : 4 + 2;
  return states + parameters;
}

std::optional<double> DeepSpeedBytes(const Config& config) {
  if (!SchemesApply(config)) return std::nullopt;
  const double states = config.optimizer_tier() == Tier::kNvme ? 2 * (4 + 8 + 4) : 0;
  const double micro_batches = static_cast<double>(config.gradient_accumulation_steps);
  const double parameters = config.parameter_tier() == Tier::kNvme ? 4 * micro_batches + 2 : 0;
  return states + parameters;
}

}  // namespace ebb::gpt
