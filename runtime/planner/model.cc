#include "ebb/runtime/planner/model.h"

#include <algorithm>

#include "ebb/runtime/planner/activations.h"

namespace ebb::planner {
namespace {

int64_t ElementsOf(const ModelUnit& unit) {
  int64_t elements = 0;
  for (const ModelTensor& tensor : unit.tensors) elements += Elements(tensor.shape);
  return elements;
}

bool HasStored(const Model& model, DType dtype) {
  for (const ModelUnit& unit : model.units) {
    for (const ModelTensor& tensor : unit.tensors) {
      if (tensor.stored == dtype) return true;
    }
  }
  return false;
}

// The positions that a token attends to on average: half of the context, or less in a window.
double PositionsOf(const ModelVisit& visit, double context) {
  const auto window = static_cast<double>(visit.window);
  return window == 0 || context <= window ? context / 2 : window - window * window / (2 * context);
}

// A product is a multiplication and an addition.
double FlopsOfTokens(const Pass& pass, double products) {
  return 2 * static_cast<double>(pass.sequences) * static_cast<double>(pass.context) * products;
}
double ForwardFlops(const ModelVisit& visit, const Pass& pass) {
  const auto context = static_cast<double>(pass.context);
  return FlopsOfTokens(pass,
                       visit.products + visit.products_a_position * PositionsOf(visit, context));
}
double BackwardFlops(const ModelVisit& visit, const Pass& pass) {
  return 2 * ForwardFlops(visit, pass) - FlopsOfTokens(pass, visit.frozen_products);
}

// A byte is read for two elements, and 2 bytes of each are written and read.
constexpr double kBytesOfDequantizing = 4.5;

bool Trains(const ModelTensor& tensor) {
  return tensor.trainable && tensor.stored != DType::kInt8;
}
bool Trains(const ModelUnit& unit) {
  return std::any_of(unit.tensors.begin(), unit.tensors.end(),
                     [](const ModelTensor& tensor) { return Trains(tensor); });
}

}  // namespace

void Model::GrowPositions(int64_t tokens) {
  for (ModelUnit& unit : units) {
    for (ModelTensor& tensor : unit.tensors) {
      if (tensor.name == kPositions) tensor.shape[0] = std::max(tensor.shape[0], tokens);
    }
  }
}

int64_t Model::parameters() const {
  int64_t parameters = 0;
  for (const ModelUnit& unit : units) {
    for (const ModelTensor& tensor : unit.tensors)
      parameters += tensor.parameters > 0 ? tensor.parameters : Elements(tensor.shape);
  }
  return parameters;
}

int64_t Model::trained_parameters() const {
  int64_t parameters = 0;
  for (const ModelUnit& unit : units) {
    for (const ModelTensor& tensor : unit.tensors)
      parameters += Trains(tensor) ? Elements(tensor.shape) : 0;
  }
  return parameters;
}

int64_t Model::largest_unit() const {
  int64_t elements = 0;
  for (const ModelUnit& unit : units) elements = std::max(elements, ElementsOf(unit));
  return elements;
}

int64_t Model::largest_module() const {
  int64_t elements = 0;
  for (const ModelUnit& unit : units) {
    for (const ModelTensor& tensor : unit.tensors) {
      const auto& shape = tensor.shape;
      const bool is_of_experts = shape.size() == 3;
      elements = std::max(elements, Elements(shape) / (is_of_experts ? shape[0] : 1));
    }
  }
  return elements;
}

absl::StatusOr<ModelSpec> SpecOf(const Model& model, const Pass& pass) {
  const absl::StatusOr<Activations> activations = ActivationsOf(model, pass);
  if (!activations.ok()) return activations.status();
  const bool keeps = HasStored(model, pass.compute);
  bool is_mixed = false;
  ModelSpec spec;
  for (const ModelUnit& unit : model.units) {
    const UnitId id = spec.AddUnit(unit.name);
    for (const ModelTensor& tensor : unit.tensors) {
      const bool is_trained = Trains(tensor), is_bytes = tensor.stored == DType::kInt8;
      const std::optional<DType> own = keeps || is_bytes ? tensor.stored : std::nullopt;
      is_mixed |= own.value_or(pass.compute) != pass.compute;
      spec.Add(id, {.name = tensor.name,
                    .shape = tensor.shape,
                    .init = Constant(0),
                    .trainable = is_trained,
                    .compute = own});
    }
  }
  spec.workspace_bytes = activations->workspace();
  for (const ModelVisit& visit : model.visits) {
    const int64_t boundary = &visit == &model.visits.back() ? 0 : activations->boundary;
    spec.forward.push_back(
        {.unit = static_cast<UnitId>(visit.unit), .output_bytes = is_mixed ? 0 : boundary});
    if (is_mixed) spec.workspace_bytes += boundary * pass.micro_batches_per_round;
  }
  return spec;
}

double FlopsOf(const Model& model, const Pass& pass) {
  double flops = 0;
  bool has_backward = false;
  for (const ModelVisit& visit : model.visits) {
    has_backward = has_backward || Trains(model.units[visit.unit]);
    flops += ForwardFlops(visit, pass) + (has_backward ? BackwardFlops(visit, pass) : 0);
  }
  return flops;
}

std::vector<const ModelVisit*> VisitsOf(const Model& model, const ModelSpec& divided) {
  std::vector<const ModelVisit*> visits;
  size_t next = 0;
  for (const Visit& visit : divided.forward) {
    const bool is_part = static_cast<size_t>(visit.unit) >= model.units.size();
    visits.push_back(is_part ? nullptr : &model.visits[next++]);
  }
  return visits;
}

std::vector<sharding::KernelWork> WorkOf(std::span<const ModelVisit* const> visits,
                                         const Pass& pass, const KernelRates& rates) {
  constexpr double kKernels = 20;  // of a visit's forward; its backward has twice as many
  std::vector<sharding::KernelWork> work;
  const auto micro_batches = static_cast<double>(pass.micro_batches_per_round);
  for (const ModelVisit* const visit : visits) {
    sharding::KernelWork& of_visit = work.emplace_back();
    if (visit == nullptr) continue;
    const double dequantizing =
        rates.bytes > 0
            ? kBytesOfDequantizing * static_cast<double>(visit->dequantized) / rates.bytes
            : 0;
    const double forward = ForwardFlops(*visit, pass) / rates.flops + dequantizing,
                 recomputed = visit->is_block && pass.recompute ? forward : 0,
                 backward = BackwardFlops(*visit, pass) / rates.flops + dequantizing + recomputed,
                 launches = micro_batches * kKernels * rates.launch;
    of_visit = {.forward = micro_batches * forward,
                .backward = micro_batches * backward,
                .caller_forward = launches,
                .caller_backward = (recomputed > 0 ? 3 : 2) * launches};
  }
  return work;
}

}  // namespace ebb::planner
