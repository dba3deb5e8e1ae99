// Reads, writes and gathers state, and continues a run from saved state. Run:
// build/release/bin/features.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "chain.h"

absl::StatusOr<double> SumOfSquaresHere(ebb::Engine& engine) {
  double sum = 0;
  const absl::Status status =
      engine.Read(ebb::StateClass::kMaster, [&](const ebb::Slice&, std::span<const float> values) {
        for (float value : values) sum += static_cast<double>(value) * value;
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  return sum;
}

absl::Status ForgetMomentum(ebb::Engine& engine) {
  return engine.Write(ebb::StateClass::kOptimizer, ebb::Constant(0), "momentum");
}

absl::Status Print(ebb::Engine& engine, ebb::World world, ebb::ParameterId parameter) {
  std::vector<float> whole(world.rank() == 0 ? kWidth : 0);
  const absl::Status status = engine.Gather(parameter, ebb::StateClass::kMaster, whole, /*root=*/0);
  if (status.ok() && world.rank() == 0) std::printf("%g ... %g\n", whole[0], whole[kWidth - 1]);
  return status;
}

namespace {

struct SavedRun {                                                                // one rank's part
  using Slices = std::map<std::pair<std::string, int64_t>, std::vector<float>>;  // name, begin
  std::map<std::string, Slices> states;                                          // "": masters
  ebb::TrainingState run;
};

absl::StatusOr<SavedRun> Save(ebb::Engine& engine, const std::vector<std::string>& state_names) {
  SavedRun saved;
  saved.states[""];
  for (const std::string& name : state_names) saved.states[name];
  for (auto& [name, slices] : saved.states) {
    const auto keep = [&](const ebb::Slice& slice, std::span<const float> values) {
      slices[{std::string(slice.name), slice.begin}].assign(values.begin(), values.end());
      return absl::OkStatus();
    };
    const auto what = name.empty() ? ebb::StateClass::kMaster : ebb::StateClass::kOptimizer;
    if (absl::Status status = engine.Read(what, keep, name); !status.ok()) return status;
  }
  const auto run = engine.training_state();
  if (!run.ok()) return run.status();
  saved.run = *run;
  return saved;
}

absl::Status Resume(ebb::Engine& engine, const SavedRun& saved) {
  for (const auto& [name, slices] : saved.states) {
    const auto give = [&](const ebb::Slice& slice, std::span<float> values) {
      const auto found = slices.find({std::string(slice.name), slice.begin});
      if (found == slices.end() || found->second.size() != values.size())
        return absl::NotFoundError(absl::StrCat("nothing was saved of ", slice.name));
      std::copy(found->second.begin(), found->second.end(), values.begin());
      return absl::OkStatus();
    };
    const auto what = name.empty() ? ebb::StateClass::kMaster : ebb::StateClass::kOptimizer;
    if (absl::Status status = engine.Write(what, give, name); !status.ok()) return status;
  }
  return engine.SetTrainingState(saved.run);
}

}  // namespace

// Takes one step twice from the same state.
absl::Status StepTwice(ebb::Engine& engine, const std::vector<Layer>& chain,
                       const std::vector<Sample>& samples) {
  const auto saved = Save(engine, {"momentum"});
  if (!saved.ok()) return saved.status();
  double losses[2] = {};
  for (double& loss : losses) {
    if (absl::Status status = Resume(engine, *saved); !status.ok()) return status;
    if (absl::Status status = TrainStep(engine, chain, samples); !status.ok()) return status;
    const auto report = engine.Report();
    if (!report.ok()) return report.status();
    if (report->step != saved->run.finished_steps + 1) return absl::InternalError("another step");
    loss = report->loss;
  }
  return losses[0] == losses[1] ? absl::OkStatus() : absl::InternalError("other bits");
}

// A step that holds its updates until its gradients were read.
absl::Status LookAtGradients(ebb::Engine& engine, const std::vector<Layer>& chain,
                             const std::vector<Sample>& samples, float& largest_here) {
  ebb::Step step = engine.BeginStep({.hold_updates = true});
  WalkThrough(step, chain, samples);
  if (absl::Status status = step.Reduce(); !status.ok()) return status;
  return engine.Read(ebb::StateClass::kGradient,
                     [&](const ebb::Slice&, std::span<const float> values) {
                       for (float value : values)
                         largest_here = std::max(largest_here, std::abs(value));
                       return absl::OkStatus();
                     });
}  // neither finished nor updated: the step is dropped with its gradients
