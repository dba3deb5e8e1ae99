#include "report/traffic.h"

#include "absl/strings/str_format.h"
#include "report/mebibytes.h"

namespace ebb::gpt {
namespace {

bool SchemesApply(const Config& config) {
  // Optimizers with two states.
  const OptimizerType type = config.optimizer.type;
  return config.compute != DType::kFloat32 &&
         (type == OptimizerType::kAdam || type == OptimizerType::kAdamW) &&
         (config.parameter_tier() == Tier::kNvme || config.optimizer_tier() == Tier::kNvme);
}

std::string Number(Direction direction, double bytes) {
  return absl::StrFormat("%s %.2f", direction == Direction::kRead ? "read" : "written", bytes);
}

}  // namespace

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

std::string TrafficTable(const std::vector<TrafficRow>& rows, const Config& config,
                         int64_t parameters, bool counted) {
  std::string table =
      absl::StrFormat("%-12s %-8s %-9s %14s", "class", "tier", "direction", "predicted MiB");
  if (counted) absl::StrAppendFormat(&table, " %14s", "MiB");
  absl::StrAppendFormat(&table, " %20s\n", "bytes a parameter");
  const double each = static_cast<double>(parameters);
  double of_nvme[2] = {};
  for (const TrafficRow& row : rows) {
    const double predicted = static_cast<double>(row.predicted_bytes);
    const double bytes = counted ? static_cast<double>(row.bytes) : predicted;
    const bool writes = row.direction == Direction::kWrite;
    absl::StrAppendFormat(&table, "%-12s %-8s %-9s %14.2f", std::string(Name(row.state)),
                          std::string(Name(row.tier)), std::string(Name(row.direction)),
                          predicted / kMebi);
    if (counted) absl::StrAppendFormat(&table, " %14.2f", bytes / kMebi);
    absl::StrAppendFormat(&table, " %20.2f\n", bytes / each);
    if (row.tier == Tier::kNvme) of_nvme[writes] += bytes / each;
  }
  if (of_nvme[0] + of_nvme[1] == 0) return table;
  absl::StrAppendFormat(&table, "NVMe, bytes a parameter and step: %.2f (%s, %s)",
                        of_nvme[0] + of_nvme[1], Number(Direction::kRead, of_nvme[0]),
                        Number(Direction::kWrite, of_nvme[1]));
  if (const auto least = LeastBytes(config))
    absl::StrAppendFormat(&table, "; least possible with nothing in RAM %g", *least);
  if (const auto deepspeed = DeepSpeedBytes(config))
    absl::StrAppendFormat(&table, "; DeepSpeed's scheme %g", *deepspeed);
  return table + "\n";
}

}  // namespace ebb::gpt
