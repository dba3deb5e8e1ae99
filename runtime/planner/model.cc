#include "ebb/runtime/planner/model.h"

#include <algorithm>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/planner/activations.h"

namespace ebb::planner {
namespace {

int64_t ElementsOf(const ModelUnit& unit) {
  int64_t elements = 0;
  for (const ModelTensor& tensor : unit.tensors) elements += Elements(tensor.shape);
  return elements;
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

absl::StatusOr<ModelSpec> SpecOf(const Model& model, const Pass& pass) {
  EBB_ASSIGN_OR_RETURN(const Activations activations, ActivationsOf(model, pass));
  ModelSpec spec;
  for (const ModelUnit& unit : model.units) {
    const UnitId id = spec.AddUnit(unit.name);
    for (const ModelTensor& tensor : unit.tensors)
      spec.Add(id, {.name = tensor.name, .shape = tensor.shape, .init = Constant(0)});
  }
  for (const ModelVisit& visit : model.visits) {
    const bool is_last = &visit == &model.visits.back();
    spec.forward.push_back({.unit = static_cast<UnitId>(visit.unit),
                            .output_bytes = is_last ? 0 : activations.boundary});
  }
  spec.workspace_bytes = activations.workspace();
  return spec;
}

double FlopsOf(const Model& model, const Pass& pass) {
  double forward = 0;
  for (const ModelVisit& visit : model.visits) forward += ForwardFlops(visit, pass);
  return 3 * forward;
}

std::vector<sharding::KernelWork> WorkOf(const Model& model, const Pass& pass, double flops,
                                         double launch) {
  constexpr double kKernels = 20;  // of a visit's forward; of its backward twice as many
  std::vector<sharding::KernelWork> work;
  const auto micro_batches = static_cast<double>(pass.micro_batches_per_round);
  for (const ModelVisit& visit : model.visits) {
    const double forward = micro_batches * ForwardFlops(visit, pass) / flops,
                 launches = micro_batches * kKernels * launch;
    const double backward = visit.is_block && pass.recompute ? 3 : 2;
    work.push_back({.forward = forward,
                    .backward = backward * forward,
                    .caller_forward = launches,
                    .caller_backward = backward * launches});
  }
  return work;
}

}  // namespace ebb::planner
