// The model as data, and what follows from it alone.
#include <algorithm>
#include <cmath>

#include "ebb/runtime/c/handles.h"
#include "ebb/runtime/engine/program.h"
#include "ebb/sharding/split.h"

namespace ebb::c {
namespace {

template <class Number>
void Widen(const void* from, int64_t begin, std::span<float> values) {
  const Number* const numbers = static_cast<const Number*>(from) + begin;
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(numbers[i]);
}

void WidenFrom(const void* source, int32_t dtype, int64_t begin, std::span<float> values) {
  switch (dtype) {
    case EBB_BF16:
      return Widen<BFloat16>(source, begin, values);
    case EBB_FP16:
      return Widen<Float16>(source, begin, values);
    case EBB_INT8:
      return Widen<uint8_t>(source, begin, values);
    default:
      return Widen<float>(source, begin, values);
  }
}

absl::StatusOr<Initialiser> FromMemory(const ebb_parameter& parameter) {
  EBB_RETURN_IF_ERROR(CheckDType("source_dtype", parameter.source_dtype));
  return Initialiser([source = parameter.source, dtype = parameter.source_dtype](
                         const Slice& slice, std::span<float> values) {
    WidenFrom(source, dtype, slice.begin, values);
    return absl::OkStatus();
  });
}

absl::StatusOr<std::optional<Split>> SplitOf(const ebb_parameter& parameter) {
  if (parameter.has_split == 0) return std::nullopt;
  const auto sizes = [](const char* field, const int64_t* first,
                        int32_t count) -> absl::StatusOr<std::vector<int64_t>> {
    if (count < 0 || (count > 0 && first == nullptr))
      return absl::InvalidArgumentError(
          absl::StrCat(field, " is null, or its number is below 0: ", count));
    return std::vector<int64_t>(first, first + count);
  };
  Split split{.dimension = parameter.split_dimension};
  EBB_ASSIGN_OR_RETURN(split.parts,
                       sizes("split_parts", parameter.split_parts, parameter.split_part_count));
  EBB_ASSIGN_OR_RETURN(split.sizes,
                       sizes("split_sizes", parameter.split_sizes, parameter.split_size_count));
  if (parameter.split_multiple != 0) split.multiple = parameter.split_multiple;
  return split;
}

// Values of which `source` has the block of one tensor rank. The engine asks for no others.
absl::StatusOr<Initialiser> FromBlock(const ebb_parameter& parameter, const ParameterSpec& spec) {
  EBB_RETURN_IF_ERROR(CheckDType("source_dtype", parameter.source_dtype));
  const int rank = parameter.block_rank, ranks = parameter.block_ranks;
  if (!spec.split)
    return absl::InvalidArgumentError("block_ranks is given, but has_split is 0: give the whole");
  if (rank < 0 || rank >= ranks)
    return absl::InvalidArgumentError(
        absl::StrCat("block_rank ", rank, " is none of ", ranks, " tensor ranks"));
  EBB_RETURN_IF_ERROR(CheckSplit(spec, ranks));
  return Initialiser([source = parameter.source, dtype = parameter.source_dtype, rank, ranks,
                      shape = spec.shape,
                      split = *spec.split](const Slice& slice, std::span<float> values) {
    for (const auto& [owner, run] : RunsOfWhole(shape, split, ranks, slice.begin, slice.end)) {
      if (owner != rank)
        return absl::InvalidArgumentError(
            absl::StrCat("elements ", run.whole, " to ", run.whole + run.count,
                         " are of the block of tensor rank ", owner,
                         ", and the source is that of tensor rank ", rank));
      WidenFrom(source, dtype, run.local,
                values.subspan(static_cast<size_t>(run.whole - slice.begin),
                               static_cast<size_t>(run.count)));
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<Initialiser> FromFile(ebb_model& model, const ebb_parameter& parameter,
                                     const std::vector<int64_t>& shape) {
  std::shared_ptr<ebb_model::Files>& files = model.files[parameter.file];
  if (files == nullptr) {
    EBB_ASSIGN_OR_RETURN(std::unique_ptr<TensorSource> source, OpenTensorSource(parameter.file));
    auto opened = std::make_shared<ebb_model::Files>();
    for (size_t i = 0; i < source->tensors().size(); ++i)
      if (source->tensors()[i].state.empty()) opened->tensor_of_name[source->tensors()[i].name] = i;
    opened->source = std::move(source);
    files = std::move(opened);
  }
  const std::string name = TextOr(parameter.tensor, parameter.name);
  const auto found = files->tensor_of_name.find(name);
  if (found == files->tensor_of_name.end()) {
    for (const LeftOutTensor& other : files->source->description().left_out)
      if (other.name == name)
        return absl::InvalidArgumentError(
            absl::StrCat("'", name, "' of '", parameter.file, "' is ", other.why));
    return absl::NotFoundError(absl::StrCat("'", parameter.file, "' has no tensor '", name, "'"));
  }
  const TensorInfo& tensor = files->source->tensors()[found->second];
  if (tensor.shape != shape) {
    return absl::InvalidArgumentError(absl::StrCat("'", name, "' of '", parameter.file,
                                                   "' has the shape ", ShapeText(tensor.shape),
                                                   ", and the parameter ", ShapeText(shape)));
  }
  const bool bytes_there = tensor.dtype == DType::kInt8;
  const bool bytes = parameter.has_dtype != 0 && parameter.dtype == EBB_INT8;
  if (bytes_there != bytes) {
    const auto kind = [](bool is_bytes) { return is_bytes ? "bytes" : "numbers"; };
    return absl::InvalidArgumentError(absl::StrCat("'", name, "' of '", parameter.file, "' is ",
                                                   kind(bytes_there), ", and the parameter ",
                                                   kind(bytes)));
  }
  return Initialiser([files, index = found->second](const Slice& slice, std::span<float> values) {
    const std::lock_guard lock(files->mutex);
    return files->source->Read(index, slice.begin, values);
  });
}

// NaN spreads to every gradient, so no step would be applied.
Initialiser WithoutNan(Initialiser given) {
  return [given = std::move(given)](const Slice& slice, std::span<float> values) -> absl::Status {
    EBB_RETURN_IF_ERROR(given(slice, values));
    const auto found =
        std::count_if(values.begin(), values.end(), [](float value) { return std::isnan(value); });
    if (found == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("the initial values of '", slice.name,
                                                   "' are NaN, ", found, " of the ", values.size(),
                                                   " from ", slice.begin, " on"));
  };
}

absl::StatusOr<Initialiser> ValuesOf(ebb_model& model, const ebb_parameter& parameter,
                                     const ParameterSpec& spec) {
  if (parameter.has_dtype != 0) EBB_RETURN_IF_ERROR(CheckDType("dtype", parameter.dtype));
  const int sources =
      (parameter.source != nullptr) + (parameter.file != nullptr) + (parameter.fill != nullptr);
  if (sources > 1) return absl::InvalidArgumentError("give only one of source, file and fill");
  if (parameter.source != nullptr && parameter.block_ranks != 0) return FromBlock(parameter, spec);
  if (parameter.source != nullptr) return FromMemory(parameter);
  if (parameter.file != nullptr) return FromFile(model, parameter, spec.shape);
  if (parameter.fill == nullptr)
    return Initialiser();  // enough to predict; the engine asks for one
  return FromFill(parameter.fill, parameter.user);
}

absl::StatusOr<Program> Predict(const ebb_model* model, int32_t world, const char* json) {
  EBB_RETURN_IF_ERROR(Models().Check(model));
  EBB_ASSIGN_OR_RETURN(const Config config, ReadConfig(json));
  ModelSpec spec = model->spec;
  for (ParameterSpec& parameter : spec.parameters)
    if (parameter.init == nullptr) parameter.init = Constant(0);
  return PredictProgram(spec, world, config);
}

}  // namespace

absl::Status CheckDType(std::string_view field, int32_t dtype) {
  if (dtype >= EBB_FP32 && dtype <= EBB_INT8) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(field), " is ", dtype,
                   ": there are EBB_FP32, EBB_BF16, EBB_FP16, and EBB_INT8 for bytes"));
}

Initialiser FromFill(ebb_fill fill, void* user) {
  return [fill, user](const Slice& slice, std::span<float> values) -> absl::Status {
    if (fill(user, static_cast<int32_t>(slice.parameter), slice.begin, slice.end, values.data()) !=
        0)
      return absl::AbortedError(absl::StrCat("fill has failed for ", slice.name));
    return absl::OkStatus();
  };
}

absl::StatusOr<Visit> VisitOf(const ebb_visit* given) {
  if (given == nullptr) return absl::InvalidArgumentError("the visit is null");
  EBB_ASSIGN_OR_RETURN(
      const ebb_visit visit,
      Taken(given, {.struct_size = 0, .unit = 0, .forward = 1, .backward = 1, .gradients = 1},
            "ebb_visit"));
  return Visit{.unit = UnitId{visit.unit},
               .forward = visit.forward != 0,
               .backward = visit.backward != 0,
               .gradients = visit.gradients != 0};
}

absl::StatusOr<std::vector<ScopeEvent>> OrderOf(const ebb_event* events, int32_t count) {
  if (count < 0 || (count > 0 && events == nullptr))
    return absl::InvalidArgumentError(absl::StrCat("an order of ", count, " events"));
  std::vector<ScopeEvent> order;
  for (int32_t i = 0; i < count; ++i) {
    if (events[i].kind < EBB_FORWARD || events[i].kind > EBB_RECOMPUTE)
      return absl::InvalidArgumentError(absl::StrCat("event ", i, " is of kind ", events[i].kind));
    order.push_back({.opens = events[i].opens != 0,
                     .backward = events[i].kind == EBB_BACKWARD,
                     .recompute = events[i].kind == EBB_RECOMPUTE,
                     .visit = events[i].visit});
  }
  return order;
}

std::vector<ebb_memory_row> RowsOf(const std::vector<MemoryRow>& rows) {
  std::vector<ebb_memory_row> given;
  for (const MemoryRow& row : rows) {
    given.push_back({.state = static_cast<int32_t>(row.state),
                     .tier = static_cast<int32_t>(row.tier),
                     .predicted = row.predicted_bytes,
                     .current = row.current_bytes,
                     .peak = row.peak_bytes});
  }
  return given;
}

}  // namespace ebb::c

using ebb::c::Call;
using ebb::c::CallForId;
using ebb::c::Models;

ebb_model* ebb_model_create(void) {
  ebb_model* model = nullptr;
  Call([&] {
    model = new ebb_model;
    Models().Add(model);
    return absl::OkStatus();
  });
  return model;
}

void ebb_model_destroy(ebb_model* model) {
  Call([&] {
    if (Models().Remove(model)) delete model;
    return absl::OkStatus();
  });
}

int32_t ebb_model_add_unit(ebb_model* model, const char* name, int32_t keep_whole) {
  return CallForId([&]() -> absl::StatusOr<int32_t> {
    EBB_RETURN_IF_ERROR(Models().Check(model));
    if (name == nullptr) return absl::InvalidArgumentError("the unit has no name");
    const ebb::UnitId id = model->spec.AddUnit(name);
    model->spec.units.back().keep_whole = keep_whole != 0;
    return static_cast<int32_t>(id);
  });
}

int32_t ebb_model_add_parameter(ebb_model* model, int32_t unit, const ebb_parameter* given) {
  return CallForId([&]() -> absl::StatusOr<int32_t> {
    EBB_RETURN_IF_ERROR(Models().Check(model));
    if (given == nullptr) return absl::InvalidArgumentError("the parameter is null");
    ebb_parameter defaults = {};
    defaults.trainable = 1;
    EBB_ASSIGN_OR_RETURN(const ebb_parameter parameter,
                         ebb::c::Taken(given, defaults, "ebb_parameter"));
    if (parameter.name == nullptr) return absl::InvalidArgumentError("the parameter has no name");
    if (unit < 0 || unit >= static_cast<int32_t>(model->spec.units.size())) {
      return absl::InvalidArgumentError(absl::StrCat(parameter.name, " was given to unit ", unit,
                                                     ", but the model has ",
                                                     model->spec.units.size()));
    }
    constexpr int32_t kDimensionsMax = 64;
    if (parameter.dimensions < 0 || parameter.dimensions > kDimensionsMax ||
        (parameter.dimensions > 0 && parameter.shape == nullptr)) {
      return absl::InvalidArgumentError(absl::StrCat(parameter.name, " has ", parameter.dimensions,
                                                     " dimensions: there may be 0 to ",
                                                     kDimensionsMax, ", and they need a shape"));
    }
    std::vector<int64_t> shape;
    if (parameter.dimensions > 0)
      shape.assign(parameter.shape, parameter.shape + parameter.dimensions);
    if (parameter.matrix_update < EBB_MUON_BY_RULE ||
        parameter.matrix_update > EBB_MUON_NOT_BY_RULE) {
      return absl::InvalidArgumentError(absl::StrCat(parameter.name, " has the matrix_update ",
                                                     parameter.matrix_update,
                                                     ", which is none of the EBB_MUON_..."));
    }
    ebb::ParameterSpec spec{
        .name = parameter.name,
        .shape = std::move(shape),
        .trainable = parameter.trainable != 0,
        .group = ebb::c::TextOr(parameter.group, ""),
        .matrix_update = static_cast<ebb::MatrixUpdate>(parameter.matrix_update),
        .sums_gradient = parameter.sums_gradient != 0};
    const auto named = [&](const absl::Status& error) {
      return absl::Status(error.code(), absl::StrCat(parameter.name, ": ", error.message()));
    };
    auto split = ebb::c::SplitOf(parameter);
    if (!split.ok()) return named(split.status());
    spec.split = *std::move(split);
    auto values = ebb::c::ValuesOf(*model, parameter, spec);
    if (!values.ok()) return named(values.status());
    if (*values != nullptr) spec.init = ebb::c::WithoutNan(*std::move(values));
    if (parameter.has_dtype != 0) spec.compute = static_cast<ebb::DType>(parameter.dtype);
    return static_cast<int32_t>(model->spec.Add(ebb::UnitId{unit}, std::move(spec)));
  });
}

int32_t ebb_model_add_visit(ebb_model* model, const ebb_visit* given) {
  return CallForId([&]() -> absl::StatusOr<int32_t> {
    EBB_RETURN_IF_ERROR(Models().Check(model));
    EBB_ASSIGN_OR_RETURN(const ebb::Visit visit, ebb::c::VisitOf(given));
    model->spec.forward.push_back(visit);
    return static_cast<int32_t>(model->spec.forward.size()) - 1;
  });
}

int32_t ebb_model_set_order(ebb_model* model, const ebb_event* events, int32_t count) {
  return Call([&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(Models().Check(model));
    EBB_ASSIGN_OR_RETURN(model->spec.order, ebb::c::OrderOf(events, count));
    return absl::OkStatus();
  });
}

int32_t ebb_plan(const ebb_model* model, int32_t world, const char* json, char* text,
                 size_t capacity, size_t* needed) {
  return Call([&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const ebb::Program program, ebb::c::Predict(model, world, json));
    return ebb::c::GiveText(program.table(), text, capacity, needed);
  });
}

int32_t ebb_predict_memory(const ebb_model* model, int32_t world, const char* json,
                           ebb_memory_row* rows, int32_t capacity, int32_t* count) {
  return Call([&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const ebb::Program program, ebb::c::Predict(model, world, json));
    return ebb::c::GiveRows(ebb::c::RowsOf(program.memory()), rows, capacity, count);
  });
}
