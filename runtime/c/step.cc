// Steps, evaluations and scopes.
#include "ebb/optim/schedule.h"
#include "ebb/runtime/c/handles.h"

namespace ebb::c {
namespace {

std::optional<double> Given(int32_t has, double value) {
  return has != 0 ? std::optional(value) : std::nullopt;
}

absl::StatusOr<std::vector<GroupRates>> RatesOf(const ebb_group_options* groups, int32_t count) {
  EBB_ASSIGN_OR_RETURN(const std::vector<const ebb_group_options*> elements,
                       Elements(groups, count, "ebb_group_options"));
  std::vector<GroupRates> rates;
  for (const ebb_group_options* given : elements) {
    EBB_ASSIGN_OR_RETURN(const ebb_group_options group,
                         Taken(given, ebb_group_options{}, "ebb_group_options"));
    rates.push_back({.group = TextOr(group.group, ""),
                     .learning_rate = Given(group.has_learning_rate, group.learning_rate),
                     .weight_decay = Given(group.has_weight_decay, group.weight_decay)});
  }
  return rates;
}

// CallLive for a `body` of the open step.
template <class Body>
int32_t CallInStep(ebb_engine* handle, Body&& body) noexcept {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    if (!engine.step) return absl::FailedPreconditionError("no step is open: call ebb_step_begin");
    return body(engine);
  });
}

ebb_engine::OpenScope* Find(ebb_engine& engine, int64_t id) {
  const auto found = std::find_if(engine.scopes.begin(), engine.scopes.end(),
                                  [&](const auto& scope) { return scope.id == id; });
  return found == engine.scopes.end() ? nullptr : &*found;
}

// Parts are behind the units that the caller made (DivideByDType), and open with these.
int32_t UnitsOfCaller(const ModelSpec& model) {
  size_t units = model.units.size();
  for (const UnitSpec& unit : model.units) units -= unit.parts.size();
  return static_cast<int32_t>(units);
}

absl::Status NoScope(int64_t id) {
  return absl::InvalidArgumentError(absl::StrCat("scope ", id, " is not open"));
}

}  // namespace
}  // namespace ebb::c

using ebb::c::CallEngine;
using ebb::c::CallInStep;
using ebb::c::CallLive;

int32_t ebb_step_begin(ebb_engine* handle, const ebb_step_options* given) {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    if (engine.step) return absl::FailedPreconditionError("a step is open: finish or drop it");
    EBB_ASSIGN_OR_RETURN(const ebb_step_options options,
                         ebb::c::Taken(given, ebb_step_options{}, "ebb_step_options"));
    ebb::StepOptions with;
    with.micro_batches = options.micro_batches;
    with.gradient_divisor = options.gradient_divisor;
    with.learning_rate = ebb::c::Given(options.has_learning_rate, options.learning_rate);
    EBB_ASSIGN_OR_RETURN(with.rates, ebb::c::RatesOf(options.groups, options.group_count));
    with.rates_at_finish = options.rates_at_finish != 0;
    with.hold_updates = options.hold_updates != 0;
    with.may_leave_out = options.may_leave_out != 0;
    engine.step = engine.engine->BeginStep(std::move(with));
    return absl::OkStatus();
  });
}

int32_t ebb_scope_open(ebb_engine* handle, int32_t kind, int32_t unit, int64_t* scope) {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    if (scope == nullptr) return absl::InvalidArgumentError("the pointer to the scope is null");
    const int32_t units = ebb::c::UnitsOfCaller(engine.engine->model());
    if (unit < 0 || unit >= units) {
      return absl::InvalidArgumentError(
          absl::StrCat("unit ", unit, " is not of the model, which has ", units));
    }
    const ebb::UnitId id{unit};
    ebb_engine::Scope opened;
    if (engine.evaluation) {
      if (kind != EBB_FORWARD)
        return absl::FailedPreconditionError(
            "an evaluation is open, which has forward scopes only");
      opened = engine.evaluation->Forward(id);
    } else if (!engine.step) {
      return absl::FailedPreconditionError(
          "neither a step nor an evaluation is open: call ebb_step_begin or ebb_evaluation_begin");
    } else if (kind == EBB_FORWARD) {
      opened = engine.step->Forward(id);
    } else if (kind == EBB_BACKWARD) {
      opened = engine.step->Backward(id);
    } else if (kind == EBB_RECOMPUTE) {
      opened = engine.step->Recompute(id);
    } else {
      return absl::InvalidArgumentError(absl::StrCat("there is no kind ", kind, " of scopes"));
    }
    *scope = ++engine.last_scope;
    engine.scopes.push_back({*scope, id, std::move(opened)});
    return absl::OkStatus();
  });
}

int32_t ebb_scope_close(ebb_engine* handle, int64_t scope) {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    ebb_engine::OpenScope* const open = ebb::c::Find(engine, scope);
    if (open == nullptr) return ebb::c::NoScope(scope);
    std::visit([](auto& closes) { closes.Close(); }, open->scope);
    engine.scopes.erase(engine.scopes.begin() + (open - engine.scopes.data()));
    return absl::OkStatus();
  });
}

int32_t ebb_scope_gradients(ebb_engine* handle, int64_t scope, const int32_t* parameters,
                            int32_t count, ebb_gradient* gradients) {
  return CallInStep(handle, [&](ebb_engine& engine) -> absl::Status {
    ebb_engine::OpenScope* const open = ebb::c::Find(engine, scope);
    if (open == nullptr) return ebb::c::NoScope(scope);
    auto* const backward = std::get_if<ebb::BackwardScope>(&open->scope);
    if (backward == nullptr)
      return absl::FailedPreconditionError("only a backward scope has gradients");
    if (count < 0 || (count > 0 && (parameters == nullptr || gradients == nullptr)))
      return absl::InvalidArgumentError(absl::StrCat("gradients of ", count, " parameters"));
    const ebb::ModelSpec& model = engine.engine->model();
    const std::vector<ebb::ParameterId> own = ebb::WithParts(model, open->unit);
    std::vector<ebb::ParameterId> of;
    for (int32_t i = 0; i < count; ++i) {
      const ebb::ParameterId id{parameters[i]};
      if (std::find(own.begin(), own.end(), id) == own.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "parameter ", parameters[i], " is not of unit '", model[open->unit].name, "'"));
      }
      if (!model[id].trainable)
        return absl::InvalidArgumentError(
            absl::StrCat("'", model[id].name, "' is frozen, so it has no gradient"));
      of.push_back(id);
    }
    std::vector<ebb::BackwardScope::Fused> fused(of.size());
    backward->fused_gradients(of, fused);
    for (size_t i = 0; i < of.size(); ++i) {
      const ebb::MutableTensorView& view = fused[i].tensor;
      if (view.data == nullptr) {
        return absl::FailedPreconditionError(
            absl::StrCat("the backward of '", model[open->unit].name,
                         "' shows no gradients: the error of the step says why"));
      }
      gradients[i] = {.data = view.data,
                      .elements = view.size(),
                      .dtype = static_cast<int32_t>(view.dtype),
                      .first = fused[i].beta == 0};
    }
    return absl::OkStatus();
  });
}

int32_t ebb_add_loss(ebb_engine* handle, const void* device_scalar) {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    if (device_scalar == nullptr) return absl::InvalidArgumentError("the loss is null");
    const ebb::TensorView loss = {.data = device_scalar};
    if (engine.evaluation) {
      engine.evaluation->AddLoss(loss);
    } else if (engine.step) {
      engine.step->AddLoss(loss);
    } else {
      return absl::FailedPreconditionError("neither a step nor an evaluation is open");
    }
    return absl::OkStatus();
  });
}

int32_t ebb_step_loss_scale(ebb_engine* handle, float* host, const void** device) {
  return CallInStep(handle, [&](ebb_engine& engine) -> absl::Status {
    if (host != nullptr) *host = engine.step->loss_scale();
    if (device != nullptr) *device = engine.step->device_loss_scale().data;
    return absl::OkStatus();
  });
}

int32_t ebb_step_reduce(ebb_engine* handle) {
  return CallInStep(handle, [&](ebb_engine& engine) -> absl::Status {
    engine.scopes.clear();
    return engine.step->Reduce();
  });
}

int32_t ebb_step_finish(ebb_engine* handle, const ebb_finish_options* given) {
  return CallInStep(handle, [&](ebb_engine& engine) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const ebb_finish_options options,
                         ebb::c::Taken(given, ebb_finish_options{}, "ebb_finish_options"));
    ebb::FinishOptions with;
    EBB_ASSIGN_OR_RETURN(with.rates, ebb::c::RatesOf(options.groups, options.group_count));
    if (options.gradient_scale != 0) with.gradient_scale = options.gradient_scale;
    if (options.error != nullptr) with.error = absl::FailedPreconditionError(options.error);
    engine.scopes.clear();
    absl::Status status = engine.step->Finish(with);
    engine.step.reset();
    return status;
  });
}

int32_t ebb_step_drop(ebb_engine* handle) {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    engine.DropSteps();
    return absl::OkStatus();
  });
}

int32_t ebb_step_report(ebb_engine* handle, ebb_report* report) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const ebb::StepReport of, engine.Report());
    return ebb::c::Give({.struct_size = 0,
                         .applied = of.applied,
                         .step = of.step,
                         .skipped_steps = of.skipped_steps,
                         .loss = of.loss,
                         .gradient_norm = of.gradient_norm,
                         .loss_scale = of.loss_scale,
                         .learning_rate = of.learning_rate},
                        report, "ebb_report");
  });
}

int32_t ebb_scheduled_rate(ebb_engine* handle, const char* name, double* rate) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    if (rate == nullptr) return absl::InvalidArgumentError("the pointer to the rate is null");
    const ebb::Config& config = engine.config();
    ebb::ParameterGroupConfig group;
    if (const std::string of = ebb::c::TextOr(name, ""); !of.empty()) {
      const auto found = config.ebb.parameter_groups.find(of);
      if (found == config.ebb.parameter_groups.end()) {
        return absl::NotFoundError(
            absl::StrCat("\"ebb.parameter_groups\" does not name group '", of, "'"));
      }
      group = found->second;
    }
    EBB_ASSIGN_OR_RETURN(const ebb::TrainingState state, engine.training_state());
    const double base = group.optimizer.value_or(config.optimizer).learning_rate;
    const double scheduled =
        ebb::optim::RatesAt(config.scheduler, base, state.applied_steps).learning_rate;
    *rate = scheduled * group.lr_factor;
    return absl::OkStatus();
  });
}

int32_t ebb_evaluation_begin(ebb_engine* handle) {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    if (engine.evaluation)
      return absl::FailedPreconditionError("an evaluation is open: ebb_evaluation_finish");
    engine.evaluation = engine.engine->BeginEvaluation();
    return absl::OkStatus();
  });
}

int32_t ebb_evaluation_finish(ebb_engine* handle, double* loss) {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    if (!engine.evaluation) return absl::FailedPreconditionError("no evaluation is open");
    std::erase_if(engine.scopes, [](const ebb_engine::OpenScope& scope) {
      return std::holds_alternative<ebb::ForwardScope>(scope.scope);
    });
    absl::StatusOr<double> mean = engine.evaluation->Finish();
    engine.evaluation.reset();
    EBB_RETURN_IF_ERROR(mean.status());
    if (loss != nullptr) *loss = *mean;
    return absl::OkStatus();
  });
}
