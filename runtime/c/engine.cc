// An engine from its making to its end.
#include "ebb/runtime/c/handles.h"

namespace ebb::c {
namespace {

// The engine keeps the model as long as it lives. The caller's values are read while it is created,
// and never again: their memory may be gone.
ModelSpec WhileThere(ModelSpec model, const std::shared_ptr<std::atomic<bool>>& there) {
  for (ParameterSpec& parameter : model.parameters) {
    if (parameter.init == nullptr) continue;
    parameter.init = [values = std::move(parameter.init), there](const Slice& slice,
                                                                 std::span<float> to) {
      if (!there->load())
        return absl::FailedPreconditionError(
            absl::StrCat("values of ", slice.name, " can be read only in ebb_engine_create"));
      return values(slice, to);
    };
  }
  return model;
}

}  // namespace

absl::StatusOr<ebb_engine*> LiveHandle(ebb_engine* handle) {
  EBB_RETURN_IF_ERROR(CheckHandle(Engines(), handle, "engine"));
  if (!handle->engine) return absl::FailedPreconditionError("the engine was closed");
  return handle;
}
absl::StatusOr<Engine*> Live(ebb_engine* handle) {
  EBB_ASSIGN_OR_RETURN(ebb_engine* const live, LiveHandle(handle));
  return &*live->engine;
}

}  // namespace ebb::c

using ebb::c::Call;

int32_t ebb_engine_create(ebb_world* world, const ebb_model* model, const char* json,
                          const ebb_engine_options* given, ebb_engine** engine) {
  return Call([&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(ebb::c::CheckHandle(ebb::c::Worlds(), world, "world"));
    EBB_RETURN_IF_ERROR(ebb::c::CheckHandle(ebb::c::Models(), model, "model"));
    if (engine == nullptr) return absl::InvalidArgumentError("the pointer to the engine is null");
    EBB_ASSIGN_OR_RETURN(const ebb_engine_options options,
                         ebb::c::Taken(given, ebb_engine_options{}, "ebb_engine_options"));
    if (options.threads < 0)
      return absl::InvalidArgumentError(absl::StrCat("threads of ebb_engine_options is ",
                                                     options.threads, ": it must be 0 or above"));
    EBB_ASSIGN_OR_RETURN(const ebb::Config config, ebb::c::ReadConfig(json));
    EBB_ASSIGN_OR_RETURN(const ebb::Device device,
                         ebb::Device::FromName(ebb::c::TextOr(options.device, "cpu"),
                                               world->world.local_rank(), options.threads));
    ebb::EngineOptions with;
    with.compute.native = options.compute_stream;
    with.name = ebb::c::TextOr(options.name, "engine");
    with.initial_values_of_rank_0 = options.initial_values_of_rank_0 != 0;
    if (options.error != nullptr) with.error = absl::FailedPreconditionError(options.error);
    const auto there = std::make_shared<std::atomic<bool>>(true);
    absl::StatusOr<ebb::Engine> made = ebb::Engine::Create(
        world->world, device, ebb::c::WhileThere(model->spec, there), config, std::move(with));
    there->store(false);
    EBB_RETURN_IF_ERROR(made.status());
    auto handle = std::make_unique<ebb_engine>();
    handle->engine = *std::move(made);
    *engine = handle.release();
    ebb::c::Engines().Add(*engine);
    return absl::OkStatus();
  });
}

int32_t ebb_engine_close(ebb_engine* handle) {
  return Call([&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(ebb::c::CheckHandle(ebb::c::Engines(), handle, "engine"));
    if (!handle->engine) return absl::OkStatus();
    handle->memory = handle->engine->HoldMemory();
    handle->scopes.clear();
    handle->evaluation.reset();
    handle->step.reset();
    handle->engine.reset();
    return absl::OkStatus();
  });
}

void ebb_engine_destroy(ebb_engine* handle) {
  Call([&] {
    if (!ebb::c::Engines().Remove(handle)) return absl::OkStatus();
    handle->scopes.clear();
    handle->evaluation.reset();
    handle->step.reset();
    delete handle;
    return absl::OkStatus();
  });
}

int32_t ebb_engine_views(ebb_engine* handle, int32_t unit, ebb_view* views, int32_t capacity,
                         int32_t* count) {
  return Call([&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(ebb::Engine* const engine, ebb::c::Live(handle));
    std::vector<ebb_view> given;
    for (const ebb::ParameterView& view : engine->Views(ebb::UnitId{unit})) {
      given.push_back(
          {.data = const_cast<void*>(view.value.data),
           .elements = view.value.size(),
           .dtype = static_cast<int32_t>(view.value.dtype),
           .gradient_dtype = view.gradient ? static_cast<int32_t>(*view.gradient) : -1});
    }
    if (given.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "unit ", unit, " has no views: the model has no such unit, or the engine is suspended"));
    }
    return ebb::c::GiveRows(given, views, capacity, count);
  });
}

int32_t ebb_engine_agree(ebb_engine* handle, const char* error) {
  bool evaluates = false;
  const int32_t code = Call([&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(ebb_engine* const engine, ebb::c::LiveHandle(handle));
    const absl::Status own =
        error == nullptr ? absl::OkStatus() : absl::FailedPreconditionError(error);
    evaluates = engine->evaluation.has_value();
    if (!evaluates) return engine->engine->Agree(own);
    engine->evaluation->Fail(own);
    return absl::OkStatus();
  });
  return evaluates ? ebb_evaluation_finish(handle, nullptr) : code;
}

int32_t ebb_engine_reorder(ebb_engine* handle, const ebb_visit* visits, int32_t visit_count,
                           const ebb_event* events, int32_t event_count) {
  return Call([&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(ebb::Engine* const engine, ebb::c::Live(handle));
    EBB_ASSIGN_OR_RETURN(const std::vector<const ebb_visit*> elements,
                         ebb::c::Elements(visits, visit_count, "ebb_visit"));
    std::vector<ebb::Visit> forward;
    for (const ebb_visit* given : elements) {
      EBB_ASSIGN_OR_RETURN(const ebb::Visit visit, ebb::c::VisitOf(given));
      forward.push_back(visit);
    }
    EBB_ASSIGN_OR_RETURN(std::vector<ebb::ScopeEvent> order, ebb::c::OrderOf(events, event_count));
    return engine->Reorder(std::move(forward), std::move(order));
  });
}

int32_t ebb_engine_suspend(ebb_engine* handle, int32_t suspended) {
  return Call([&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(ebb::Engine* const engine, ebb::c::Live(handle));
    return suspended != 0 ? engine->Suspend() : engine->Resume();
  });
}

int32_t ebb_engine_copy_parameters(ebb_engine* handle, ebb_engine* from) {
  return Call([&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(ebb::Engine* const engine, ebb::c::Live(handle));
    EBB_ASSIGN_OR_RETURN(ebb::Engine* const other, ebb::c::Live(from));
    return engine->CopyParametersFrom(*other);
  });
}
