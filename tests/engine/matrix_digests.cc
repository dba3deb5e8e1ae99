#include "tests/engine/matrix_digests.h"

#include <bit>
#include <cstdint>
#include <fstream>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/traffic.h"
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
  for (const MemoryRow& row : sharding::PredictMemory(*plan)) {
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
  sharding::Fragment fragment = sharding::Lower(*plan, plan->decisions.carries());
  const sharding::Fragment* const only[] = {&fragment};
  sharding::DeriveWaits(
      sharding::Cells(only, static_cast<int>(plan->layout.units.size()), plan->decisions.shards),
      fragment);
  for (const sharding::Instruction& instruction : fragment.instructions)
    waits += instruction.waits.size();
  absl::StrAppend(&line, "memory ", Hex(memory), "\ttraffic ", Hex(traffic), "\tcommunication ",
                  Hex(communication), "\toperations ", plan->operations.size(), "\twaits ", waits);
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
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat(path, " cannot be written"));
  return absl::OkStatus();
}

}  // namespace ebb::testing
