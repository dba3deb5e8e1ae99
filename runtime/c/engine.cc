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

absl::Status CheckBlock(const void* from, const void* to, int64_t elements, int32_t dtype) {
  EBB_RETURN_IF_ERROR(CheckDType("dtype", dtype));
  if (elements > 0 && from != nullptr && to != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a collective of the tensor ranks over ", elements, " elements",
                   from == nullptr || to == nullptr ? ", with a null pointer" : ""));
}

}  // namespace

absl::Status CheckLive(const ebb_engine* handle) {
  EBB_RETURN_IF_ERROR(Engines().Check(handle));
  return handle->engine ? absl::OkStatus() : absl::FailedPreconditionError("the engine was closed");
}

}  // namespace ebb::c

using ebb::c::Call;
using ebb::c::CallEngine;
using ebb::c::CallLive;

namespace {

absl::StatusOr<ebb::OptimizerSpec> OwnOptimizer(const ebb_engine_options& options) {
  if (options.update_state_count < 0 ||
      (options.update_state_count > 0 && options.update_states == nullptr))
    return absl::InvalidArgumentError(
        absl::StrCat("update_states of ebb_engine_options: ", options.update_state_count));
  ebb::OptimizerSpec spec;
  for (int32_t state = 0; state < options.update_state_count; ++state)
    spec.states.push_back(ebb::c::TextOr(options.update_states[state], ""));
  spec.update = [update = options.update,
                 user = options.update_user](const ebb::UpdateSlice& of) -> absl::Status {
    std::vector<float*> states;
    for (const std::span<float> state : of.states) states.push_back(state.data());
    const ebb_update_slice slice = {.parameter = static_cast<int32_t>(of.slice.parameter),
                                    .states = static_cast<int32_t>(states.size()),
                                    .begin = of.slice.begin,
                                    .end = of.slice.end,
                                    .step = of.step,
                                    .learning_rate = of.learning_rate,
                                    .master = of.master.data(),
                                    .gradient = of.gradient.data(),
                                    .state = states.data(),
                                    .stream = of.stream.native};
    if (update(user, &slice) == 0) return absl::OkStatus();
    return absl::AbortedError(absl::StrCat("the caller's optimizer failed at parameter ",
                                           slice.parameter, " in step ", slice.step));
  };
  return spec;
}

}  // namespace

int32_t ebb_engine_create(ebb_world* world, const ebb_model* model, const char* json,
                          const ebb_engine_options* given, ebb_engine** engine) {
  return Call([&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(ebb::c::Worlds().Check(world));
    EBB_RETURN_IF_ERROR(ebb::c::Models().Check(model));
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
    if (options.update != nullptr) {
      EBB_ASSIGN_OR_RETURN(with.optimizer, OwnOptimizer(options));
    }
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
    EBB_RETURN_IF_ERROR(ebb::c::Engines().Check(handle));
    if (!handle->engine) return absl::OkStatus();
    handle->memory = handle->engine->HoldMemory();
    handle->DropSteps();
    handle->engine.reset();
    return absl::OkStatus();
  });
}

void ebb_engine_destroy(ebb_engine* handle) {
  Call([&] {
    if (!ebb::c::Engines().Remove(handle)) return absl::OkStatus();
    handle->DropSteps();
    delete handle;
    return absl::OkStatus();
  });
}

int32_t ebb_engine_views(ebb_engine* handle, int32_t unit, ebb_view* views, int32_t capacity,
                         int32_t* count) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    std::vector<ebb_view> given;
    for (const ebb::ParameterView& view : engine.Views(ebb::UnitId{unit})) {
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

int32_t ebb_engine_await_whole(ebb_engine* handle, int32_t unit, int32_t* is_whole) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    if (is_whole == nullptr) return absl::InvalidArgumentError("the pointer to is_whole is null");
    EBB_ASSIGN_OR_RETURN(const bool whole, engine.AwaitWhole(ebb::UnitId{unit}));
    *is_whole = whole ? 1 : 0;
    return absl::OkStatus();
  });
}

int32_t ebb_engine_agree(ebb_engine* handle, const char* error) {
  bool evaluates = false;
  const int32_t code = CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    const absl::Status own =
        error == nullptr ? absl::OkStatus() : absl::FailedPreconditionError(error);
    evaluates = engine.evaluation.has_value();
    if (!evaluates) return engine.engine->Agree(own);
    engine.evaluation->Fail(own);
    return absl::OkStatus();
  });
  return evaluates ? ebb_evaluation_finish(handle, nullptr) : code;
}

int32_t ebb_engine_reorder(ebb_engine* handle, const ebb_visit* visits, int32_t visit_count,
                           const ebb_event* events, int32_t event_count) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const std::vector<const ebb_visit*> elements,
                         ebb::c::Elements(visits, visit_count, "ebb_visit"));
    std::vector<ebb::Visit> forward;
    for (const ebb_visit* given : elements) {
      EBB_ASSIGN_OR_RETURN(const ebb::Visit visit, ebb::c::VisitOf(given));
      forward.push_back(visit);
    }
    EBB_ASSIGN_OR_RETURN(std::vector<ebb::ScopeEvent> order, ebb::c::OrderOf(events, event_count));
    return engine.Reorder(std::move(forward), std::move(order));
  });
}

int32_t ebb_engine_suspend(ebb_engine* handle, int32_t suspended) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    return suspended != 0 ? engine.Suspend() : engine.Resume();
  });
}

int32_t ebb_engine_mesh(ebb_engine* handle, ebb_mesh_facts* facts) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    const ebb::TensorAxis tensor = engine.tensor();
    return ebb::c::Give({.struct_size = 0,
                         .data_rank = engine.data_rank(),
                         .data_ranks = engine.data_ranks(),
                         .tensor_rank = tensor.rank(),
                         .tensor_ranks = tensor.size()},
                        facts, "ebb_mesh_facts");
  });
}

int32_t ebb_tensor_all_reduce(ebb_engine* handle, void* values, int64_t elements, int32_t dtype,
                              int32_t operation) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(ebb::c::CheckBlock(values, values, elements, dtype));
    if (operation < EBB_SUM || operation > EBB_MIN)
      return absl::InvalidArgumentError(
          absl::StrCat("operation is ", operation, ": there are EBB_SUM, EBB_MAX and EBB_MIN"));
    engine.tensor().AllReduce({values, static_cast<ebb::DType>(dtype), {&elements, 1}},
                              static_cast<ebb::ReduceOp>(operation));
    return absl::OkStatus();
  });
}

int32_t ebb_tensor_all_gather(ebb_engine* handle, const void* block, void* blocks, int64_t elements,
                              int32_t dtype) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(ebb::c::CheckBlock(block, blocks, elements, dtype));
    const int64_t all = elements * engine.tensor().size();
    const auto type = static_cast<ebb::DType>(dtype);
    engine.tensor().AllGather({block, type, {&elements, 1}}, {blocks, type, {&all, 1}});
    return absl::OkStatus();
  });
}

int32_t ebb_tensor_reduce_scatter(ebb_engine* handle, const void* blocks, void* block,
                                  int64_t elements, int32_t dtype) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(ebb::c::CheckBlock(blocks, block, elements, dtype));
    const int64_t all = elements * engine.tensor().size();
    const auto type = static_cast<ebb::DType>(dtype);
    engine.tensor().ReduceScatter({blocks, type, {&all, 1}}, {block, type, {&elements, 1}});
    return absl::OkStatus();
  });
}

int32_t ebb_engine_copy_parameters(ebb_engine* handle, ebb_engine* from) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(ebb::c::CheckLive(from));
    return engine.CopyParametersFrom(*from->engine);
  });
}
