#include "operation_times.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ebb::bench {
namespace {

double Median(std::vector<double> samples) {
  if (samples.empty()) return 0;
  const auto middle = samples.begin() + std::ssize(samples) / 2;
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

}  // namespace

absl::Status OperationTimes::AddMeasured(const std::string& trace, int64_t turn, int64_t skipped) {
  std::ifstream file(trace);
  const auto events = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!events.is_array()) return absl::InvalidArgumentError(absl::StrCat(trace, " is no timeline"));
  constexpr double kMicro = 1e-6;
  std::map<int64_t, std::map<std::string, double>> steps;
  for (const auto& event : events) {
    if (event.at("ph") != "X" || event.at("pid") != 0) continue;
    const int64_t step = event.at("args").value("step", int64_t{0}) - 1;  // -1: of an evaluation
    if (step < turn || step % turn < skipped) continue;
    steps[step][event.at("cat").get<std::string>()] += kMicro * event.at("dur").get<double>();
  }
  for (const auto& [number, step] : steps) Add(step, measured_);
  return absl::OkStatus();
}

void OperationTimes::AddSimulated(const sharding::Plan& plan, const sharding::Simulated& step) {
  const sharding::OpList list = sharding::ListOf(plan, /*carrying=*/true);
  std::map<std::string, double> seconds;
  for (const sharding::SimulatedSpan& span : step.spans) {
    if (span.step != sharding::kSimulatedSteps - 2) continue;
    seconds[std::string(sharding::FactsOf(list.ops[span.op].role).name)] += span.end - span.begin;
  }
  Add(seconds, simulated_);
}

void OperationTimes::Print(double least) const {
  for (const auto& [operation, samples] : simulated_) {
    const auto spans = measured_.find(operation);
    if (spans == measured_.end()) continue;  // kernels, of which a timeline has parts
    const double simulated = Median(samples), measured = Median(spans->second);
    if (std::max(simulated, measured) < least) continue;
    absl::PrintF("  %-29s %13.1f %13.1f %+7.1f%%\n", operation, 1e3 * simulated, 1e3 * measured,
                 100 * (simulated / measured - 1));
  }
}

void OperationTimes::Add(const std::map<std::string, double>& step, Samples& samples) {
  for (const auto& [operation, seconds] : step) samples[operation].push_back(seconds);
}

}  // namespace ebb::bench
