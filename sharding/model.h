// The model as data: parameters, the units they are gathered in, and the order in which forward
// visits the units. Nothing here allocates device memory or talks to another rank; a ModelSpec can
// be printed, tested and planned anywhere.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/base/name_view.h"

namespace ebb {

// Strong ids: a unit cannot be passed where a parameter is meant. Both index the vectors of
// ModelSpec.
enum class UnitId : int32_t {};
enum class ParameterId : int32_t {};

// Elements [begin, end) of one flattened (row-major) parameter.
struct Slice {
  ParameterId parameter{};
  NameView name;  // lives as long as the engine
  std::span<const int64_t> shape;
  int64_t begin = 0, end = 0;
};

// Fills one slice with fp32 values. Called at Create, concurrently, only for slices that this rank
// owns, in pieces of at most 4 MiB. The values must be a pure function of (name, index), so that
// any world size gives the same model. Debug builds call some pieces a second time with other cuts,
// and refuse a source that gives other values then.
using Initialiser = std::function<absl::Status(const Slice&, std::span<float>)>;

Initialiser Constant(float value);

// Normal(0, stddev) by a counter: value i of a parameter depends on (seed, name, i) and nothing
// else. Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
// section 4) and Box-Muller in fp64. So the models of two engines have equal values where names and
// seeds are equal. If a parameter is divided over the parts of a world (World::Split), give each
// part a seed of its own.
Initialiser Normal(float stddev, uint64_t seed);

// How tensor ranks, which together hold one copy of the model, share a parameter (Axis::kTensor).
enum class OverTensor : uint8_t {
  kUnsaid,  // allowed where there are no tensor ranks
  // Each tensor rank has all of it and computes the same gradient, as of a norm, or of the bias of
  // a row-parallel layer. Its gradient counts once in the norm, and each step verifies that the
  // replicas' squares are equal.
  kWhole,
  kLocal,  // each tensor rank has a part of its own, as of a column-parallel weight
};

// How a parameter is cut over the tensor ranks of ebb.mesh, as Megatron-LM cuts the weights of its
// column and row parallel layers (Shoeybi et al., arXiv:1909.08053, section 3). The parameter's shape
// stays the whole one. A scope shows this rank's block of it.
//
//   {.dimension = 0}                                     rows: column parallel, of weights [out, in]
//   {.dimension = 1}                                     columns: row parallel
//   {.dimension = 0, .parts = {q, k, v}, .multiple = 64} fused: each part by itself, in whole heads
//
// Ranks get equal numbers of multiples. Where these do not divide, the first ranks get one more. A
// block has its parts one behind the other.
struct Split {
  int dimension = 0;
  std::vector<int64_t> parts = {};  // sizes along the dimension; empty: one part
  int64_t multiple = 1;             // a rank's size of each part is a multiple of this one
  // By tensor rank, of a single part: the sizes along the dimension, as another library has cut it.
  // Empty: as above.
  std::vector<int64_t> sizes = {};
  friend bool operator==(const Split&, const Split&) = default;
};

// The part of a parameter with a Split that a tensor rank has. Set by Engine::Create.
struct Block {
  int rank = 0, ranks = 1;                // tensor rank
  std::vector<int64_t> whole_shape = {};  // ParameterSpec::shape, as the trainer gave it
  // The shape that scopes show. ParameterSpec::shape is that of the largest block: each tensor rank has
  // memory for it, so that all have one plan. What is behind a smaller block is 0.
  std::vector<int64_t> shape = {};
};

// Whether an optimizer of whole matrices updates a parameter, if the configuration has one (Muon).
enum class MatrixUpdate : uint8_t {
  kByRule,  // of runtime/engine/matrix_groups.h
  kYes,     // a matrix, or with three dimensions one matrix for each of the first
  kNo,
  kNotByRule,  // the rule does not take it, whatever its name: an embedding or an output layer
};

struct ParameterSpec {
  std::string name;            // unique in the model; the key in checkpoints
  std::vector<int64_t> shape;  // {}: a scalar
  Initialiser init = {};       // required; Create names the parameter that lacks one
  bool trainable =
      true;  // false: stored once, in the compute dtype; no master, gradient or optimizer state
  std::string group = "";  // key of "ebb.parameter_groups" in the JSON
  int64_t cut_rows =
      0;  // 0: shards may be cut anywhere; n: only at multiples of n rows (first dimension)
  // The dtype that scopes show it in; none: the config's ("bf16", "fp16", else fp32). The gradient
  // has this dtype too, unless the config sets one for all. kInt8: bytes that only the trainer
  // understands, as a quantised base. Such a parameter is frozen and never cast, and its values are
  // 0 to 255.
  std::optional<DType> compute = {};
  MatrixUpdate matrix_update = MatrixUpdate::kByRule;
  // Rows of the matrices that lie one behind the other in it, as of q, k and v in one. Empty: it is
  // one matrix. An optimizer of whole matrices takes each by itself.
  std::vector<int64_t> matrix_rows = {};
  // Every parameter must say it if the engine has tensor ranks (ebb.mesh.tensor, or
  // EngineOptions::verdict) and no parameter has a `split`. Beside parameters with a split, one that
  // says nothing is whole, and kLocal is an error.
  OverTensor over_tensor = OverTensor::kUnsaid;
  // Over the tensor ranks of ebb.mesh; without them it changes nothing. Initialisers, optimizers of
  // the trainer's, and calls for state see slices of the whole parameter.
  std::optional<Split> split = {};
  // For a parameter that is whole over tensor: the gradient of each tensor rank is a term of a sum,
  // as of norms and biases under sequence parallelism. The engine adds the terms up once a step,
  // after the last reduction over the data ranks. Otherwise the ranks' gradients must be equal.
  bool sums_gradient = false;
  std::optional<Block> block = {};  // see Block
};

struct UnitSpec {
  std::string name;
  std::vector<ParameterId> parameters = {};
  // Every rank keeps the parameters whole, on the device, also at stage 3: for parameters in
  // constant use. Small units are kept whole anyway (stage3_param_persistence_threshold,
  // stage3_model_persistence_threshold). These settings do not count units with keep_whole.
  bool keep_whole = false;
  // Set by DivideByDType for a unit with several dtypes, or with parameters that are whole over
  // tensor beside others: the units with the other parameters. The parts' scopes open and close
  // with this unit's.
  std::vector<UnitId> parts = {};
  // Set by DivideByDType: the optimizer's states are kept in blocks of so many elements, which no
  // two parameters and no two ranks share. 0: not in blocks.
  int state_block = 0;
  // Set by DivideByDType: an optimizer of whole matrices (MatrixUpdate::kYes) updates its trainable
  // parameters.
  bool has_matrices = false;
};

// One use of a unit in a round: a forward scope and, from the first trainable visit on, a backward
// scope.
struct Visit {
  UnitId unit{};
  int64_t output_bytes =
      0;  // most bytes of the boundary activation per micro-batch; 0: the trainer keeps its own
  // Which scopes the visit has. A head that is computed in its backward has no forward. A use that
  // needs no gradient has no backward. A unit with several uses in a round may take all gradients
  // in one backward, because autograd adds them up until then. The unit's other backwards only show
  // parameters, and reduce nothing. The backward that takes gradients must be the unit's last scope
  // in the round.
  bool forward = true;
  bool backward = true;
  bool gradients = true;
  // Set by DivideByDType: to a part, inside of the scope of its unit. Such a visit is none of those
  // that boundaries pass through.
  bool of_part = false;
  // Bytes that a rank's kernels receive from the other tensor ranks of ebb.mesh (TensorAxis), in the
  // scopes of one micro-batch: what tables and simulations predict.
  int64_t forward_tensor_bytes = 0, backward_tensor_bytes = 0;
};

// A scope opens or closes: a visit's forward, its backward, or a recompute (Step::Recompute), a
// forward scope between the two.
struct ScopeEvent {
  bool opens = true;
  bool backward = false;
  bool recompute = false;
  int visit = 0;  // index into ModelSpec::forward
};

struct ModelSpec {
  std::vector<ParameterSpec> parameters;
  std::vector<UnitSpec> units;
  std::vector<Visit>
      forward;  // the order of forward; backward is its reverse, down to the first trainable visit
  // All that opens and closes in a round, in time order, for scopes that do not follow each other
  // in the order of `forward`. Empty: as `forward` says. Scopes that are open together lie apart in
  // memory, and a unit has one address in all its scopes and rounds.
  //
  //   F0( F1 F2 )  B0( B2 B1 )               a root (visit 0) that stays open over its blocks
  //   F0 F1 F2 F3  R2 R3 B3 B2  R0 R1 B1 B0  segments of two blocks, recomputed in backward
  //   F0 F1 F2 B2 B1 B0  F3 F4 B4 B3         two walks in one round
  //
  //   model.order.push_back({.visit = 0});                           // F0 opens
  //   model.AddScope({.visit = 1});                                  // F1 opens and closes
  //   model.order.push_back({.opens = false, .visit = 0});           // F0 closes
  //   model.AddScope({.recompute = true, .visit = 1});               // R1
  //   model.AddScope({.backward = true, .visit = 1});                // B1
  //
  // A block that is used twice, with gradients that backward adds up, needs no order:
  // forward = {{.unit = block}, {.unit = block, .gradients = false}}. Visit 0 ends backward.
  //
  // The errors of Create about an order, with the event and the unit. A scope opens twice, closes
  // before it opens, or stays open. A backward opens before its visit's forward has closed. A
  // recompute is not between the two, or no backward follows it. A visit has a forward or gradients
  // without a scope for them. Two backwards of one unit that take gradients are open together. A
  // trainable unit has a scope after the last backward that takes its gradients, when the unit may
  // have been updated. The engine keeps boundaries, and scopes are open together or not in the
  // order of the chain.
  std::vector<ScopeEvent> order = {};
  int64_t workspace_bytes =
      0;  // the trainer's scratch on the device: planned, counted, served by Engine::workspace()
  // Bytes of the workspace that the trainer never writes. If the device's memory is the host's,
  // these bytes take no RAM, and the check of the host's memory leaves them out.
  int64_t workspace_untouched_bytes = 0;
  // The dtypes that the trainer's kernels take: of parameters and boundary activations, and of
  // gradients. Empty: any. Engine::Create and PredictMemory refuse a configuration with others and
  // name its keys.
  std::vector<DType> compute_dtypes = {}, gradient_dtypes = {};

  UnitId AddUnit(std::string name);
  ParameterId Add(UnitId unit, ParameterSpec parameter);
  void AddScope(ScopeEvent scope);  // to `order`: the scope opens and closes at once

  // Whether a parameter has a `split`: the model is given whole, and the engine cuts it.
  bool has_splits() const;

  const ParameterSpec& operator[](ParameterId id) const {
    return parameters[static_cast<size_t>(id)];
  }
  const UnitSpec& operator[](UnitId id) const { return units[static_cast<size_t>(id)]; }
};

// Elements of a shape: the product of its dimensions, 1 for a scalar.
int64_t Elements(std::span<const int64_t> shape);
// The shape of the whole parameter, and of what a scope shows of it.
inline const std::vector<int64_t>& WholeShape(const ParameterSpec& parameter) {
  return parameter.block ? parameter.block->whole_shape : parameter.shape;
}
inline const std::vector<int64_t>& ShownShape(const ParameterSpec& parameter) {
  return parameter.block ? parameter.block->shape : parameter.shape;
}

struct StateBlocks {
  int elements = 0;  // of a block of an optimizer state; 0: states are not in blocks
  // Smaller parameters have states that are not in blocks.
  int64_t least_size = 0;
};
// A plan's units have one dtype each, are whole over tensor or not, have states in blocks or not,
// and have matrices (UnitSpec::has_matrices) or others. A unit with several kinds keeps those parameters that are as its first trainable one, which
// is one that is not whole if there is any; the others become parts, which are visited with it.
// `compute`: the config's dtype. Engine::Create and PredictProgram do this; it changes nothing of a
// model that is divided.
ModelSpec DivideByDType(ModelSpec model, DType compute, const StateBlocks& blocks = {});
// The parameters of a unit and of its parts, in the order of the trainer.
std::vector<ParameterId> WithParts(const ModelSpec& model, UnitId unit);

// The errors of Create about a model, with the name of the unit or parameter: duplicate or empty
// names, a dimension below 1, a missing initialiser, ids out of range, a parameter in two units or
// in none, an empty unit, a unit that forward never visits, sizes with a sum above 2^53, a boundary
// missing in the middle of a chain, and the rules of ModelSpec::order. A model without anything
// trainable is legal: it can be evaluated.
absl::Status Validate(const ModelSpec& model);

}  // namespace ebb
