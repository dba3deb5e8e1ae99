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

// A product is a multiplication and an addition. A token attends to half of the context on average.
double ForwardFlops(const ModelVisit& visit, const Pass& pass) {
  const double tokens = static_cast<double>(pass.sequences) * static_cast<double>(pass.context);
  return 2 * tokens *
         (visit.products + visit.products_a_position * static_cast<double>(pass.context) / 2);
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
  int64_t elements = 0;
  for (const ModelUnit& unit : units) elements += ElementsOf(unit);
  return elements;
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
      const bool is_trained = tensor.stored != DType::kInt8;
      const std::optional<DType> own = keeps || !is_trained ? tensor.stored : std::nullopt;
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
  double forward = 0;
  for (const ModelVisit& visit : model.visits) forward += ForwardFlops(visit, pass);
  return 3 * forward;
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
                                         const Pass& pass, double flops, double launch) {
  constexpr double kKernels = 20;  // of a visit's forward; its backward has twice as many
  std::vector<sharding::KernelWork> work;
  const auto micro_batches = static_cast<double>(pass.micro_batches_per_round);
  for (const ModelVisit* const visit : visits) {
    sharding::KernelWork& of_visit = work.emplace_back();
    if (visit == nullptr) continue;
    const double forward = micro_batches * ForwardFlops(*visit, pass) / flops,
                 launches = micro_batches * kKernels * launch;
    const double backward = visit->is_block && pass.recompute ? 3 : 2;
    of_visit = {.forward = forward,
                .backward = backward * forward,
                .caller_forward = launches,
                .caller_backward = backward * launches};
  }
  return work;
}

}  // namespace ebb::planner
