#include "tests/engine/snapshot.h"

#include <algorithm>
#include <limits>

#include "ebb/runtime/config/status_macros.h"

namespace ebb::testing {

absl::StatusOr<Snapshot> TakeSnapshot(Engine& engine, const ModelSpec& model,
                                      const std::vector<std::string>& states) {
  Snapshot snapshot;
  EBB_ASSIGN_OR_RETURN(snapshot.masters, GatherAll(engine, model, StateClass::kMaster));
  EBB_ASSIGN_OR_RETURN(snapshot.parameters, GatherAll(engine, model, StateClass::kParameter));
  for (const std::string& state : states) {
    std::vector<float>& all = snapshot.states.emplace_back();
    EBB_RETURN_IF_ERROR(engine.Read(
        StateClass::kOptimizer,
        [&](const Slice&, std::span<const float> values) {
          all.insert(all.end(), values.begin(), values.end());
          return absl::OkStatus();
        },
        state));
  }
  return snapshot;
}

absl::StatusOr<ParameterValues> ReadSlices(Engine& engine, const ModelSpec& model, StateClass what,
                                           const std::string& state) {
  ParameterValues whole;
  for (const ParameterSpec& parameter : model.parameters) {
    whole.emplace_back(static_cast<size_t>(Elements(parameter.shape)),
                       std::numeric_limits<float>::quiet_NaN());
  }
  const auto keep = [&](const Slice& slice, std::span<const float> values) {
    EXPECT_EQ(slice.name, model[slice.parameter].name);
    EXPECT_EQ(static_cast<int64_t>(values.size()), slice.end - slice.begin);
    std::copy(values.begin(), values.end(),
              whole[static_cast<size_t>(slice.parameter)].begin() + slice.begin);
    return absl::OkStatus();
  };
  EBB_RETURN_IF_ERROR(engine.Read(what, keep, state));
  return whole;
}

absl::Status TrainStep(Engine& engine, ScriptedTrainer& trainer, int64_t number,
                       StepOptions options) {
  trainer.BeginStep(number, nullptr);
  Step step = engine.BeginStep(options);
  for (int round = 0; round < step.rounds(); ++round) trainer.Round(step);
  return FinishAndReport(engine, step);
}

ParameterValues GradientSums(const ModelSpec& model, int world, int64_t step, int micro_batches) {
  ParameterValues sums;
  for (const ParameterSpec& parameter : model.parameters)
    sums.emplace_back(static_cast<size_t>(Elements(parameter.shape)), 0.0f);
  for (int rank = 0; rank < world; ++rank) {
    for (int visit = 0; visit < kScriptedVisits; ++visit) {
      for (ParameterId id : model[UnitId{kScriptedUnits[visit]}].parameters) {
        if (!model[id].trainable) continue;
        std::vector<float>& sum = sums[static_cast<size_t>(id)];
        for (int m = 0; m < micro_batches; ++m) {
          for (size_t i = 0; i < sum.size(); ++i) {
            const int64_t mixed = 7 * rank + 5 * step + 3 * visit + 11 * m +
                                  13 * static_cast<int64_t>(id) + static_cast<int64_t>(i);
            sum[i] += static_cast<float>(mixed % 31 - 15) / 16;
          }
        }
      }
    }
  }
  return sums;
}

void RunOn(const Setting& setting, const ModelSpec& model, const Config& config,
           const std::function<absl::Status(Engine& engine, ScriptedTrainer& trainer)>& body,
           const EngineOptions& options) {
  const absl::Status status = RunEngines(setting, model, config, body, options);
  EXPECT_TRUE(status.ok()) << setting << ": " << status;
}

}  // namespace ebb::testing
