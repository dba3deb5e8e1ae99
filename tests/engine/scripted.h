// A trainer with numbers that do not depend on the order of its scopes. Every contribution to a
// gradient is a few exact bits. So a step off the declared order must end with the masters of the
// declared one bit for bit, and every parameter that a scope shows is compared with its known
// value.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/ebb.h"
#include "tests/full.h"
#include "tests/ranks.h"

namespace ebb::testing {

enum class Timing { kEarly, kLate, kOff };
inline constexpr Timing kTimings[] = {Timing::kEarly, Timing::kLate, Timing::kOff};
inline constexpr Timing kNotEarly[] = {Timing::kLate, Timing::kOff};

struct Setting {
  int world = 1;
  int stage = 0;
  Timing timing = Timing::kLate;
};
std::ostream& operator<<(std::ostream& out, const Setting& setting);

// fp32, AdamW; every unit is released at stage 3, and every collective is of one unit.
Config ConfigFor(const Setting& setting);
// With all that its stage allows on NVMe, and no RAM but for staging.
Config OnNvme(Config config, const std::string& path);
// Two cells, because the bitwise matrix has all pairs: two ranks at stage 3, which has most to do, and
// another, which differs between tests. If Full() both worlds at each stage.
std::vector<Setting> WorldsAndStages(Setting other = {.world = 3, .stage = 1});
// A cell at several timings.
std::vector<Setting> At(Setting setting, std::span<const Timing> timings);
std::string NameOf(const ::testing::TestParamInfo<Setting>& info);

// forward: u0 u1 u2 u3 u4 u0. u0 is tied, u2 frozen. u1 and u3 have one size, so collectives do not
// notice if one is taken for the other.
ModelSpec ScriptedModel(int64_t boundary_bytes = 0);
inline constexpr int kScriptedVisits = 6;
inline constexpr int kScriptedUnits[kScriptedVisits] = {0, 1, 2, 3, 4, 0};

using ParameterValues = std::vector<std::vector<float>>;  // by parameter

class ScriptedTrainer {
 public:
  ScriptedTrainer(const ModelSpec& model, int rank) : model_(model), rank_(rank) {}

  // The values that scopes must show from now on; null: not compared. `wrong` gets differences;
  // null: they fail the test.
  void BeginStep(int64_t step, const ParameterValues* shown,
                 std::vector<std::string>* wrong = nullptr);
  void Look(const Scope& scope, int unit) const;
  // `visit`: the gradient's, wherever it comes in the step.
  void Add(BackwardScope& scope, int visit) const;

  void Forward(Step& step, int unit) const { Look(step.Forward(UnitId{unit}), unit); }
  void Backward(Step& step, int visit) const;
  // A round in the declared order, and its halves. `without`: visits with a backward of zeros.
  void ForwardAll(Step& step) const;
  void BackwardAll(Step& step, std::vector<int> without = {}) const;
  void Round(Step& step, std::vector<int> without = {}) const;

  int rank() const { return rank_; }
  int64_t step() const { return step_; }

 private:
  const ModelSpec& model_;
  int rank_ = 0;
  int64_t step_ = 0;
  const ParameterValues* shown_ = nullptr;
  std::vector<std::string>* wrong_ = nullptr;
};

// One after the other, in any order.
inline void ForwardOf(const ScriptedTrainer& trainer, Step& step, const std::vector<int>& units) {
  for (int unit : units) trainer.Forward(step, unit);
}
inline void BackwardOf(const ScriptedTrainer& trainer, Step& step, const std::vector<int>& visits) {
  for (int visit : visits) trainer.Backward(step, visit);
}

// The declared scopes of a round from one on to another.
inline constexpr int kScriptedScopes = 2 * kScriptedVisits;
inline void DeclaredScopes(const ScriptedTrainer& trainer, Step& step, int begin, int end) {
  for (int scope = begin; scope < end; ++scope) {
    if (scope < kScriptedVisits) {
      trainer.Forward(step, kScriptedUnits[scope]);
    } else {
      trainer.Backward(step, kScriptedScopes - 1 - scope);
    }
  }
}

// Creates an engine on every rank and runs `body` on each.
absl::Status RunEngines(
    const Setting& setting, const ModelSpec& model, const Config& config,
    const std::function<absl::Status(Engine& engine, ScriptedTrainer& trainer)>& body,
    const EngineOptions& options = {});

// The outcome of a step, on every rank: Finish returns this rank's own error, Report the verdict.
absl::Status FinishAndReport(Engine& engine, Step& step);
// The outcome of a step that has finished.
absl::Status Reported(Engine& engine, const absl::Status& finished);

using Script = std::function<void(const ScriptedTrainer& trainer, Step& step)>;

struct ScriptRun {
  absl::Status status;                 // the first error of any rank
  std::vector<ParameterValues> shown;  // before each step, as scopes show it (only where gathered)
  ParameterValues masters;             // after the last
  std::string log;                     // written to standard error
};

struct ScriptOptions {
  int steps = 3;
  // A power of two keeps the bits exact.
  StepOptions step = {.gradient_divisor = 4};
  const std::vector<ParameterValues>* shown =
      nullptr;  // compare with this; null: gather and return it
};

// Runs `script` as every step. Gathers between steps only where asked to, so that late updates of
// one step are still on their way in the next. Views of scopes are compared only if no step fails,
// because a scope for which there is no room shows anything, and Finish says so.
ScriptRun RunScript(const Setting& setting, const ModelSpec& model, const Config& config,
                    const Script& script, ScriptOptions options = {});

// The whole of one class, by parameter, on every rank.
absl::StatusOr<ParameterValues> GatherAll(Engine& engine, const ModelSpec& model, StateClass what);

// How often `part` occurs in `text`.
int Occurrences(const std::string& text, const std::string& part);

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

// Sums of what ScriptedTrainer::Add puts into the gradients of a step, over all ranks, visits and
// micro-batches, undivided; 0 for the frozen ones.
ParameterValues GradientSums(const ModelSpec& model, int world, int64_t step,
                             int micro_batches = 1);

// Fails the test where `body`, of an Engine& and a ScriptedTrainer&, asserts or returns an error.
template <class Body>
void RunOn(const Setting& setting, const ModelSpec& model, const Config& config, const Body& body,
           const EngineOptions& options = {}) {
  const absl::Status status = RunEngines(
      setting, model, config,
      [&](Engine& engine, ScriptedTrainer& trainer) { return StatusOfRank(body, engine, trainer); },
      options);
  EXPECT_TRUE(status.ok()) << setting << ": " << status;
}

}  // namespace ebb::testing
