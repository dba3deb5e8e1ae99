#include "tests/engine/matrix_digests.h"

#include <bit>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/report/machine_costs.h"
#include "ebb/sharding/report/simulate.h"
#include "ebb/sharding/report/traffic.h"
#include "ebb/sharding/waits.h"
#include "tests/sharding/random_model.h"

namespace ebb::testing {
namespace {

using sharding::Hasher;

constexpr uint64_t kPlans = 400;

int64_t Bits(double value) {
  return std::bit_cast<int64_t>(value);
}

std::string Hex(const Hasher& hasher) {
  return absl::StrCat(absl::Hex(hasher.hash(), absl::kZeroPad16));
}

std::string LineOf(const Cell& cell, const Outcome& outcome) {
  Hasher state, steps, evaluation;
  for (size_t s = 0; s < outcome.state.size(); ++s) {
    state.Add(outcome.arrays[s]);
    for (const uint32_t bits : outcome.state[s]) state.Add(static_cast<int64_t>(bits));
  }
  for (const Outcome::Step& step : outcome.steps) {
    steps.Add(step.number).Add(step.applied).Add(step.skipped_steps);
    for (const double value : {step.loss, step.gradient_norm, step.loss_scale, step.learning_rate})
      steps.Add(Bits(value));
  }
  evaluation.Add(Bits(outcome.evaluation));
  return absl::StrCat("cell\t", cell.Describe(), "\tstate ", Hex(state), "\tsteps ", Hex(steps),
                      "\tevaluation ", Hex(evaluation));
}

std::string LineOf(const sharding::RandomCase& random) {
  std::string line = absl::StrCat("plan\t", random.description(), "\t");
  const absl::StatusOr<sharding::Plan> plan = sharding::PlanStep(random.inputs());
  if (!plan.ok()) return line + std::string(plan.status().message());
  Hasher memory, traffic, communication;
  for (const MemoryRow& row : sharding::PredictMemory(plan->table.bytes)) {
    memory.Add(Name(row.state)).Add(static_cast<int64_t>(row.tier));
    memory.Add(static_cast<int64_t>(row.predicted_bytes));
  }
  for (const TrafficRow& row : sharding::PredictTraffic(*plan)) {
    traffic.Add(Name(row.state)).Add(static_cast<int64_t>(row.tier));
    traffic.Add(static_cast<int64_t>(row.direction)).Add(static_cast<int64_t>(row.predicted_bytes));
  }
  for (const CommunicationRow& row : sharding::PredictCommunication(*plan))
    communication.Add(row.operation).Add(static_cast<int64_t>(row.predicted_bytes));
  size_t waits = 0;
  sharding::OpList list = sharding::ListOf(*plan, plan->carries_updates);
  const sharding::OpList* const only[] = {&list};
  sharding::DeriveWaits(sharding::Cells(only, *plan), list);
  for (const sharding::Waits& of : list.waits) waits += of.on.size();
  absl::StrAppend(&line, "memory ", Hex(memory), "\ttraffic ", Hex(traffic), "\tcommunication ",
                  Hex(communication), "\toperations ", plan->Shown(), "\twaits ", waits);
  return line;
}

// A machine on which a step of these models waits for each of its parts somewhere.
sharding::Machine SmallMachine(bool device_is_host) {
  using enum sharding::Resource;
  sharding::Machine machine{.ranks_per_host = 2,
                            .device_is_host = device_is_host,
                            .core_bytes = 2e9,
                            .issue = 1e-6,
                            .collective = 1e-6,
                            .collective_rank = 1e-7,
                            .transfer = 1e-5};
  for (int r = 0; r < sharding::kResources; ++r)
    machine.rates[static_cast<sharding::Resource>(r)] = 2e9;
  machine.rates[kDevice] = 1;
  machine.rates[kCores] = 4;
  for (const auto below : {kDiskRead, kDiskWrite, kDisk, kNetwork}) machine.rates[below] /= 2;
  return machine;
}

std::string TimesOf(const sharding::RandomCase& random) {
  std::string line = absl::StrCat("plan-time\t", random.description());
  const absl::StatusOr<sharding::Plan> plan = sharding::PlanStep(random.inputs());
  if (!plan.ok()) return absl::StrCat(line, "\t", plan.status().message());
  constexpr double kSecondsAnElement = 1e-9;
  std::vector<sharding::KernelWork> work;
  for (const Visit& visit : random.model.forward) {
    const size_t unit = static_cast<size_t>(visit.unit);
    const double forward =
        kSecondsAnElement * static_cast<double>(plan->layout.units[unit].elements());
    work.push_back({.forward = forward, .backward = 2 * forward});
  }
  for (const bool device_is_host : {false, true}) {
    const auto costs = sharding::MachineCosts::Make(*plan, SmallMachine(device_is_host), work,
                                                    /*caller_awaits_report=*/device_is_host);
    if (!costs.ok()) return absl::StrCat(line, "\t", costs.status().message());
    const absl::StatusOr<sharding::Simulated> simulated = sharding::Simulate(*plan, *costs);
    if (!simulated.ok()) return absl::StrCat(line, "\t", simulated.status().message());
    absl::StrAppend(&line, "\t", device_is_host ? "CPU " : "GPU ",
                    absl::StrFormat("%.4e", simulated->seconds_per_step));
  }
  return line;
}

}  // namespace

absl::Status WriteDigests(const std::string& path, std::span<const Cell> cells) {
  std::ofstream file(path);
  for (const Cell& cell : cells) {
    const absl::StatusOr<Outcome> outcome = RunCell(cell);
    if (!outcome.ok())
      return absl::Status(outcome.status().code(),
                          absl::StrCat(cell.Describe(), ": ", outcome.status().message()));
    file << LineOf(cell, *outcome) << "\n";
  }
  for (uint64_t seed = 0; seed < kPlans; ++seed)
    file << LineOf(sharding::RandomCase(seed, /*offloads=*/seed % 2 == 1)) << "\n";
  for (uint64_t seed = 0; seed < kPlans; ++seed)
    file << TimesOf(sharding::RandomCase(seed, /*offloads=*/seed % 2 == 1)) << "\n";
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat(path, " cannot be written"));
  return absl::OkStatus();
}

}  // namespace ebb::testing
