#include "ebb/runtime/planner/model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ebb/runtime/planner/activations.h"

namespace ebb::planner {
namespace {

// On one of so many tensor ranks.
int64_t ElementsOf(const ModelUnit& unit, int tensor_ranks) {
  int64_t elements = 0;
  for (const ModelTensor& tensor : unit.tensors) {
    const int64_t ranks = tensor.split ? tensor_ranks : 1;
    elements += (Elements(tensor.shape) + ranks - 1) / ranks;
  }
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

// Norms and sums of a block read and write each row: a norm two of its elements, a sum three;
// in backward three each. Without sequence parallelism every tensor rank does it for all rows.
double SecondsOfWholeRows(const Model& model, const ModelVisit& visit, const Pass& pass,
                          const KernelRates& rates, bool backward) {
  if (!visit.is_block || model.tensor_ranks == 1 || pass.sequence_parallel || rates.bytes <= 0)
    return 0;
  const double ranks = model.tensor_ranks, passes = backward ? 6 : 5,
               bytes = passes * static_cast<double>(visit.tensor_outputs * pass.tokens()) *
                       SizeOf(pass.compute);
  return bytes * (1 - 1 / ranks) / rates.bytes;  // the rank's own share is among its kernels
}

// The exchanges of one micro-batch. A ring brings each rank all that a collective gathers, or sums,
// but its own part.
//
//                      forward                       backward
//   whole rows         outputs are summed for all    likewise gradients of inputs
//   sequence parallel  inputs are gathered, and      the same for gradients; inputs are gathered
//                      outputs summed in parts       again, because each rank keeps its rows
class Exchanges {
 public:
  Exchanges(const Model& model, const ModelVisit& visit, const Pass& pass)
      : visit_(visit),
        pass_(pass),
        width_(static_cast<double>(model.width)),
        vocabulary_(static_cast<double>(model.vocabulary)),
        received_(static_cast<double>(pass.tokens()) * (model.tensor_ranks - 1) /
                  model.tensor_ranks) {}

  struct Exchange {
    double bytes = 0;  // that a rank receives
    double collectives = 0;
    friend Exchange operator+(const Exchange& a, const Exchange& b) {
      return {a.bytes + b.bytes, a.collectives + b.collectives};
    }
  };

  Exchange Forward() const {
    constexpr double kNumberBytes = 4;
    Exchange of;
    if (pass_.sequence_parallel) Add(visit_.tensor_inputs, 1, of);
    Add(visit_.tensor_outputs, pass_.sequence_parallel ? 1 : 2, of);
    if (visit_.tensor_numbers == 0) return of;
    if (pass_.torch) {  // a model of transformers gathers its logits
      AddBytes(vocabulary_ * SizeOf(pass_.compute), 1, of);
    } else {  // the largest logit, and then a sum
      AddBytes(2 * kNumberBytes * static_cast<double>(visit_.tensor_numbers), 2, of);
    }
    return of;
  }
  // A block whose forward runs again there exchanges what that one does, too.
  Exchange Backward() const {
    Exchange of;
    Add(visit_.tensor_inputs, 2, of);
    if (pass_.sequence_parallel) Add(visit_.tensor_outputs, 1, of);
    return visit_.is_block && pass_.recompute ? of + Forward() : of;
  }

 private:
  // `times`: an all-reduce brings all elements twice, the others once.
  void Add(int64_t elements, double times, Exchange& to) const {
    const auto number = static_cast<double>(elements);
    AddBytes(times * number * SizeOf(pass_.compute), std::ceil(number / width_), to);
  }
  void AddBytes(double of_token, double collectives, Exchange& to) const {
    to.bytes += of_token * received_;
    to.collectives += collectives;
  }

  const ModelVisit& visit_;
  const Pass& pass_;
  const double width_, vocabulary_, received_;
};

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
  for (const ModelUnit& unit : units) elements = std::max(elements, ElementsOf(unit, tensor_ranks));
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
      ParameterSpec parameter{.name = tensor.name,
                              .shape = tensor.shape,
                              .init = Constant(0),
                              .trainable = is_trained,
                              .compute = own};
      if (model.tensor_ranks > 1) {
        parameter.split = tensor.split;
        parameter.sums_gradient =
            is_trained && !tensor.split && (tensor.sums_gradient || pass.sequence_parallel);
      }
      spec.Add(id, std::move(parameter));
    }
  }
  spec.workspace_bytes = activations->workspace();
  for (const ModelVisit& visit : model.visits) {
    const int64_t boundary = &visit == &model.visits.back() ? 0 : activations->boundary;
    Visit& added = spec.forward.emplace_back(
        Visit{.unit = static_cast<UnitId>(visit.unit), .output_bytes = is_mixed ? 0 : boundary});
    if (model.tensor_ranks > 1) {
      const Exchanges exchanges(model, visit, pass);
      added.forward_tensor_bytes = std::llround(exchanges.Forward().bytes);
      added.backward_tensor_bytes = std::llround(exchanges.Backward().bytes);
    }
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

std::vector<sharding::KernelWork> WorkOf(const Model& model,
                                         std::span<const ModelVisit* const> visits,
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
    const double forward = ForwardFlops(*visit, pass) / rates.flops + dequantizing +
                           SecondsOfWholeRows(model, *visit, pass, rates, /*backward=*/false),
                 recomputed = visit->is_block && pass.recompute ? forward : 0,
                 backward = BackwardFlops(*visit, pass) / rates.flops + dequantizing +
                            SecondsOfWholeRows(model, *visit, pass, rates, /*backward=*/true) +
                            recomputed,
                 launches = micro_batches * kKernels * rates.launch;
    of_visit = {.forward = micro_batches * forward,
                .backward = micro_batches * backward,
                .caller_forward = launches,
                .caller_backward = (recomputed > 0 ? 3 : 2) * launches};
    if (model.tensor_ranks == 1) continue;
    const Exchanges exchanges(model, *visit, pass);
    of_visit.forward_collectives = micro_batches * exchanges.Forward().collectives;
    of_visit.backward_collectives = micro_batches * exchanges.Backward().collectives;
  }
  return work;
}

}  // namespace ebb::planner
