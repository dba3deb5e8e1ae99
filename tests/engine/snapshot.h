// What an engine holds, taken whole so that a test can say "nothing changed", and what the scripted
// trainer's gradients sum to.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/engine/scripted.h"

namespace ebb::testing {

struct Snapshot {
  ParameterValues masters, parameters;     // whole
  std::vector<std::vector<float>> states;  // this rank's slices, by state
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};
inline void PrintTo(const Snapshot& snapshot, std::ostream* out) {
  *out << "a snapshot of " << snapshot.masters.size() << " parameters";
}

// Collective.
absl::StatusOr<Snapshot> TakeSnapshot(Engine& engine, const ModelSpec& model,
                                      const std::vector<std::string>& states = {"exp_avg",
                                                                                "exp_avg_sq"});

// This rank's slices of one class, laid into whole parameters; NaN where other ranks' are.
absl::StatusOr<ParameterValues> ReadSlices(Engine& engine, const ModelSpec& model, StateClass what,
                                           const std::string& state = "");

// One step in the declared order. The divisor is a power of two, so gradients stay exact.
inline constexpr StepOptions kExactStep = {.gradient_divisor = 4};
absl::Status TrainStep(Engine& engine, ScriptedTrainer& trainer, int64_t number,
                       StepOptions options = kExactStep);

// What ScriptedTrainer::Add puts into the gradients of a step, over all ranks, visits and
// micro-batches, undivided; 0 for the frozen ones.
ParameterValues GradientSums(const ModelSpec& model, int world, int64_t step,
                             int micro_batches = 1);

// Fails the test where a body fails on any rank.
void RunOn(const Setting& setting, const ModelSpec& model, const Config& config,
           const std::function<absl::Status(Engine& engine, ScriptedTrainer& trainer)>& body,
           const EngineOptions& options = {});

}  // namespace ebb::testing
