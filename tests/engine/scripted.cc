#include "tests/engine/scripted.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing {

std::string NameOf(const ::testing::TestParamInfo<Setting>& info) {
  return absl::StrCat("World", info.param.world, "Stage", info.param.stage);
}

std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  constexpr const char* kNames[] = {"early", "late", "off"};
  return out << "world " << setting.world << ", stage " << setting.stage << ", updates "
             << kNames[static_cast<int>(setting.timing)];
}

Config ConfigFor(const Setting& setting) {
  Config config;
  config.micro_batch_size = 1;
  config.gradient_accumulation_steps = 1;
  config.optimizer.learning_rate = 0.01;
  config.zero.stage = setting.stage;
  config.zero.param_persistence_threshold = 0;
  config.ebb.coalesce_bytes = 0;
  config.ebb.timeout_seconds = 120;
  if (setting.timing == Timing::kEarly) {
    config.gradient_clipping = 0;
    config.ebb.check_overflow = false;
  } else {
    config.ebb.asynchronous_step =
        setting.timing == Timing::kLate ? AsynchronousStep::kLate : AsynchronousStep::kOff;
  }
  return config;
}

Config OnNvme(Config config, const std::string& path) {
  OffloadParamConfig& parameters = config.zero.offload_param;
  OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  if (config.zero.stage == 3) parameters.device = Tier::kNvme;
  if (config.zero.stage > 0) optimizer.device = Tier::kNvme;
  parameters.nvme_paths = optimizer.nvme_paths = {path};
  parameters.pin_memory = optimizer.pin_memory = false;
  parameters.max_in_cpu = 0;
  config.ebb.verify_swap = VerifySwap::kStates;  // which needs no look at how fast the disk is
  return config;
}

std::vector<Setting> WorldsAndStages(Setting other) {
  if (!Full()) return {{.world = 2, .stage = 3}, other};
  std::set<std::pair<int, int>> cells;
  for (int stage = 0; stage <= 3; ++stage)
    for (const int world : {2, other.world}) cells.emplace(world, stage);
  std::vector<Setting> settings;
  for (const auto& [world, stage] : cells) settings.push_back({.world = world, .stage = stage});
  return settings;
}

std::vector<Setting> At(Setting setting, std::span<const Timing> timings) {
  std::vector<Setting> settings;
  for (Timing timing : timings) {
    setting.timing = timing;
    settings.push_back(setting);
  }
  return settings;
}

ModelSpec ScriptedModel(int64_t boundary_bytes) {
  ModelSpec model;
  const auto unit = [&](int number, std::vector<ParameterSpec> parameters) {
    const UnitId id = model.AddUnit(absl::StrCat("u", number));
    for (ParameterSpec& parameter : parameters) {
      parameter.init = Normal(0.5f, 7);
      model.Add(id, std::move(parameter));
    }
  };
  unit(0, {{.name = "embedding", .shape = {11, 9}}, {.name = "norm", .shape = {7}}});
  unit(1,
       {{.name = "w1", .shape = {13, 10}}, {.name = "base1", .shape = {65}, .trainable = false}});
  unit(2, {{.name = "base2", .shape = {10, 10}, .trainable = false}});
  unit(3,
       {{.name = "w3", .shape = {13, 10}}, {.name = "base3", .shape = {65}, .trainable = false}});
  unit(4, {{.name = "w4", .shape = {300}}, {.name = "b4", .shape = {}}});
  for (int visited : kScriptedUnits) model.forward.push_back({.unit = UnitId{visited}});
  for (int v = 0; v + 1 < kScriptedVisits; ++v) {
    model.forward[static_cast<size_t>(v)].output_bytes = boundary_bytes;
  }
  return model;
}

void ScriptedTrainer::BeginStep(int64_t step, const ParameterValues* shown,
                                std::vector<std::string>* wrong) {
  step_ = step;
  shown_ = shown;
  wrong_ = wrong;
}

void ScriptedTrainer::Look(const Scope& scope, int unit) const {
  for (ParameterId id : model_[UnitId{unit}].parameters) {
    const std::vector<float> values = Values(scope.parameter(id));
    if (shown_ == nullptr || values == (*shown_)[static_cast<size_t>(id)]) continue;
    const std::string what = absl::StrCat(
        "parameter '", model_[id].name, "' shows other values on rank ", rank_, " in step ", step_);
    if (wrong_ == nullptr) {
      ADD_FAILURE() << what;
    } else {
      wrong_->push_back(what);
    }
  }
}

void ScriptedTrainer::Add(BackwardScope& scope, int visit) const {
  for (ParameterId id : model_[UnitId{kScriptedUnits[visit]}].parameters) {
    if (!model_[id].trainable) continue;
    std::vector<float> values(static_cast<size_t>(Elements(model_[id].shape)));
    for (int m : scope.micro_batches()) {
      for (size_t i = 0; i < values.size(); ++i) {
        const int64_t mixed = 7 * rank_ + 5 * step_ + 3 * visit + 11 * m +
                              13 * static_cast<int64_t>(id) + static_cast<int64_t>(i);
        values[i] = static_cast<float>(mixed % 31 - 15) / 16;
      }
      AddTo(scope.gradient(id), values);
    }
  }
}

void ScriptedTrainer::Backward(Step& step, int visit) const {
  BackwardScope scope = step.Backward(UnitId{kScriptedUnits[visit]});
  Look(scope, kScriptedUnits[visit]);
  Add(scope, visit);
}

void ScriptedTrainer::ForwardAll(Step& step) const {
  for (int unit : kScriptedUnits) Forward(step, unit);
}

void ScriptedTrainer::BackwardAll(Step& step, std::vector<int> without) const {
  for (int visit = kScriptedVisits - 1; visit >= 0; --visit) {
    if (std::find(without.begin(), without.end(), visit) == without.end()) {
      Backward(step, visit);
    } else {
      Look(step.Backward(UnitId{kScriptedUnits[visit]}), kScriptedUnits[visit]);
    }
  }
}

void ScriptedTrainer::Round(Step& step, std::vector<int> without) const {
  ForwardAll(step);
  BackwardAll(step, std::move(without));
}

absl::StatusOr<ParameterValues> GatherAll(Engine& engine, const ModelSpec& model, StateClass what) {
  ParameterValues values;
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    values.emplace_back(static_cast<size_t>(Elements(model.parameters[p].shape)));
    if (absl::Status status =
            engine.Gather(ParameterId{static_cast<int32_t>(p)}, what, values.back());
        !status.ok()) {
      return status;
    }
  }
  return values;
}

absl::Status RunEngines(
    const Setting& setting, const ModelSpec& model, const Config& config,
    const std::function<absl::Status(Engine& engine, ScriptedTrainer& trainer)>& body,
    const EngineOptions& options) {
  return RunThreads(setting.world, [&](World world) -> absl::Status {
    absl::StatusOr<Engine> engine = Engine::Create(world, Device::Cpu(), model, config, options);
    if (!engine.ok()) return engine.status();
    ScriptedTrainer trainer(model, world.rank());
    return body(*engine, trainer);
  });
}

absl::Status FinishAndReport(Engine& engine, Step& step) {
  return Reported(engine, step.Finish());
}

absl::Status Reported(Engine& engine, const absl::Status& finished) {
  const absl::Status reported = engine.Report().status();
  return reported.ok() ? finished : reported;
}

ScriptRun RunScript(const Setting& setting, const ModelSpec& model, const Config& config,
                    const Script& script, ScriptOptions options) {
  ScriptRun run;
  std::vector<std::vector<std::string>> wrong(static_cast<size_t>(setting.world));
  ::testing::internal::CaptureStderr();
  run.status = RunEngines(
      setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        for (int number = 0; number < options.steps; ++number) {
          if (options.shown == nullptr) {
            absl::StatusOr<ParameterValues> shown =
                GatherAll(engine, model, StateClass::kParameter);
            if (!shown.ok()) return shown.status();
            if (trainer.rank() == 0) run.shown.push_back(*std::move(shown));
            trainer.BeginStep(number, nullptr);
          } else {
            trainer.BeginStep(number, &(*options.shown)[static_cast<size_t>(number)],
                              &wrong[static_cast<size_t>(trainer.rank())]);
          }
          Step step = engine.BeginStep(options.step);
          script(trainer, step);
          // The next step begins before the outcome of this one is known.
          absl::Status status = step.Finish();
          if (!status.ok() || number + 1 == options.steps) status = Reported(engine, status);
          if (!status.ok()) return status;
        }
        absl::StatusOr<ParameterValues> masters = GatherAll(engine, model, StateClass::kMaster);
        if (!masters.ok()) return masters.status();
        if (trainer.rank() == 0) run.masters = *std::move(masters);
        return absl::OkStatus();
      });
  run.log = ::testing::internal::GetCapturedStderr();
  for (const std::vector<std::string>& of_rank : wrong) {
    for (const std::string& what : of_rank) EXPECT_FALSE(run.status.ok()) << what;
  }
  return run;
}

int Occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

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

}  // namespace ebb::testing
