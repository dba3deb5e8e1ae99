// Decisions of the config for this model and world: which units are kept whole, which gradients are
// summed where, when updates run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/base/encoding.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/matrices.h"

namespace ebb::sharding {

struct PlanInputs;

enum class UpdateTiming : uint8_t { kEarly, kLate, kOff };
std::string_view Name(UpdateTiming timing);

// Decisions that follow from model, world and config and hold for every step.
struct Decisions {
  int world = 1;
  int shards = 1;  // ranks that each unit is cut over: the world, or a shard group of it
  int replicas() const { return world / shards; }
  // hpZ: ranks that hold a secondary copy of each unit together, a part each, in the order of their
  // slices; a divisor of `shards`. 0: there is none.
  int secondary_shards = 0;
  bool has_secondary() const { return secondary_shards > 0; }
  // Elements of this rank's part of a section.
  int64_t SecondaryShard(const Section& section) const {
    return section.elements / secondary_shards;
  }
  // Bytes that one rank receives when `shard` elements of every rank of a shard group become whole,
  // or sends when they are summed.
  int64_t RingBytes(int64_t shard, DType dtype) const {
    return (shards - 1) * shard * SizeOf(dtype);
  }
  int stage = 0;
  int rounds = 1;  // that are planned
  int64_t micro_batches_per_round = 1;
  DType compute{}, communication{}, accumulation{};
  // By unit: the dtype of its parameters (ParameterSpec::compute). Empty: all have `compute`.
  std::vector<DType> own_compute = {};
  DType compute_of(int unit) const {
    return own_compute.empty() ? compute : own_compute[static_cast<size_t>(unit)];
  }
  // A unit with a dtype of its own has its gradients in that dtype; other units have theirs in
  // `compute`.
  DType communication_of(int unit) const {
    return communication == compute ? compute_of(unit) : communication;
  }
  DType gradient_of(int unit) const {
    return sums_before_reducing ? accumulation : communication_of(unit);
  }
  bool reduce_at_round = true;  // as resolved; with one round the two are the same
  bool keeps_step_gradients =
      false;  // reduce_at step over several rounds: each visit has an accumulator
  bool sums_before_reducing = false;
  DType gradient{};  // of the whole gradients: communication, or accumulation where several are
                     // summed before they are reduced
  // What reductions send and sum. With replicas fp32, so that the one rounding to the communication
  // dtype comes after the last addition, as without them.
  DType reduced(int unit) const {
    return replicas() > 1 ? DType::kFloat32 : communication_of(unit);
  }
  bool casts(int unit) const {
    return gradient_of(unit) != communication_of(unit) || rounds_slices(unit);
  }
  bool rounds_slices(int unit) const { return reduced(unit) != communication_of(unit); }
  // ebb.deterministic_reduce: of gradients of several ranks, and of a trainer's kernels over tensor.
  bool sums_in_scratch = false, tensor_sums_in_scratch = false;
  int optimizer_states = 0;  // the most of a unit
  // By unit: what Muon makes orthogonal. Such a unit has one state, the momentum. All empty: there
  // are no such units.
  std::vector<std::vector<OwnedMatrix>> matrices = {};
  DType direction{};            // of what is made orthogonal
  int64_t iteration_steps = 0;  // the most of a matrix
  bool has_matrices(int unit) const { return !matrices.empty() && !matrices[unit].empty(); }
  // Each matrix is whole on its owner for a moment; otherwise every rank has all of them.
  bool exchanges_matrices() const { return stage > 0 && shards > 1; }
  int states_of(int unit) const { return has_matrices(unit) ? 1 : optimizer_states; }
  // By state, if they are not fp32; those in blocks in units with UnitSpec::state_block alone.
  std::vector<Encoding> state_encodings = {};
  std::vector<bool> state_blocks = {};  // by unit
  Encoding state_encoding(int unit, int state) const {
    if (state_encodings.empty() || has_matrices(unit)) return DType::kFloat32;
    const Encoding& encoding = state_encodings[state];
    return encoding.block == 0 || state_blocks[unit] ? encoding : DType::kFloat32;
  }
  bool own_optimizer = false;
  // By parameter: its optimizer takes norms of all of it before an update (LAMB, LARS). By unit:
  // how many states these read, -1: it has no such parameter.
  std::vector<bool> takes_norms = {};
  std::vector<int> norm_states = {};
  int sets_without_norms = 0;  // at most: of options that other parameters are updated with
  bool has_norms() const {
    return std::find(takes_norms.begin(), takes_norms.end(), true) != takes_norms.end();
  }
  // Where each class lives. Units kept whole have their parameters on the device.
  Tier parameter_tier = Tier::kDevice, optimizer_tier = Tier::kDevice,
       gradient_tier = Tier::kDevice, activation_tier = Tier::kDevice;
  bool gradients_follow = true;  // a unit updated on the device alone keeps its gradient there
  bool offloads() const {
    return parameter_tier != Tier::kDevice || optimizer_tier != Tier::kDevice ||
           gradient_tier != Tier::kDevice || activation_tier != Tier::kDevice;
  }
  bool split_master = false;
  bool stochastic_rounding = false;  // there are no masters beside the bf16 parameters
  // fp32 parameters are their own masters unless something is offloaded. Other parameters are
  // written beside the master, or beside its low half.
  bool writes_parameters(int unit) const {
    return compute_of(unit) != DType::kFloat32 || parameter_tier != Tier::kDevice ||
           optimizer_tier != Tier::kDevice;
  }
  // An update also reads the parameters, as masters or halves of them.
  bool reads_parameters(int unit) const {
    return (split_master || stochastic_rounding) && compute_of(unit) == DType::kBFloat16;
  }
  bool reads_any_parameters() const {
    return MostOfUnits([this](int unit) { return reads_parameters(unit); });
  }
  // A master, or its low half, lies beside the parameter, or is the parameter.
  bool keeps_master(int unit) const { return !reads_parameters(unit) || !stochastic_rounding; }
  Encoding master_encoding(int unit) const {
    return reads_parameters(unit) ? kLowHalves : Encoding(DType::kFloat32);
  }
  // Bytes of a piece with so many elements: of the master, of one state, and of all that is beside the
  // parameter.
  int64_t MasterBytes(int unit, int64_t elements) const {
    return keeps_master(unit) ? master_encoding(unit).bytes(elements) : 0;
  }
  int64_t StateBytes(int unit, int state, int64_t elements) const {
    return state < states_of(unit) ? state_encoding(unit, state).bytes(elements) : 0;
  }
  int64_t BytesBeside(int unit, int64_t elements) const {
    int64_t bytes = MasterBytes(unit, elements);
    for (int state = 0; state < optimizer_states; ++state)
      bytes += StateBytes(unit, state, elements);
    return bytes;
  }
  // The most that a trainable unit has of something.
  template <class Of>
  std::invoke_result_t<const Of&, int> MostOfUnits(const Of& of) const {
    std::invoke_result_t<const Of&, int> most{};
    for (int unit = 0; unit < static_cast<int>(trainable.size()); ++unit)
      if (trainable[static_cast<size_t>(unit)]) most = std::max(most, of(unit));
    return most;
  }
  UpdateTiming timing = UpdateTiming::kLate;
  std::string timing_reason;
  // The trainer may write the step's gradients until Finish: norms are taken there.
  bool holds = false;
  // By unit with any parameters on NVMe: its update runs in the next step, just ahead of its
  // gather. The gather takes the new parameters while they are on their way to the disk. The same
  // in every variant of a step. All late updates are carried. One of three early updates is
  // carried, because forward is about a third of a step's kernels; so the disk has the same work in
  // each second of a step. This is the second of three: the first forward then waits for little,
  // and after the last forward the disk is not behind when the first gradient comes.
  std::vector<bool> carried;
  // If the config's updates are early and parameters are on NVMe: from a unit's last gather on, the
  // masters (or parameters) that its update reads are in memory. So the update reads none of its
  // own. The same in every variant of a step; variants with late updates have none.
  bool shares_reads = false;
  std::vector<bool> kept_whole;  // by unit: every rank keeps all parameters
  std::vector<bool>
      accumulates;  // by unit: reduced slices are summed in a shard of the accumulation dtype
  std::vector<bool> trainable;  // by unit
  // Ranks that exchange records: the world, or with tensor ranks (ParameterSpec::over_tensor) those
  // of all parts. Then the trainable units that are whole over tensor: their squares are compared.
  int verdict_ranks = 1;
  std::vector<int> compared = {};
  int tensor_ranks() const { return verdict_ranks / world; }
  // Some parameters are blocks of a whole (ParameterSpec::block): norms are of the whole.
  bool has_blocks = false;
  // By unit: its gradient is a sum over tensor (ParameterSpec::sums_gradient). Its reduced shard
  // accumulates, so that terms are not rounded, and is on the device, whatever gradient_tier is.
  std::vector<bool> sums_tensor = {};
  DType shard_dtype(int unit) const {
    return accumulates[unit] ? accumulation : communication_of(unit);
  }
};

// `rounds`: of the step; 0: as the config says.
absl::StatusOr<Decisions> Decide(const PlanInputs& inputs, const ModelLayout& layout, int rounds,
                                 bool hold_updates);

// Upper limits of the elements in one group of gathers and in one group of reductions.
int64_t GatherGroupElements(const Config& config, DType compute);
int64_t ReduceGroupBytes(const Config& config);

// Elements of each unit's slice in a parameter slot, counted in the configured dtype. The part that
// stays in RAM is not known yet; this counts as if it were none.
std::vector<int64_t> SlotElements(const ModelLayout& layout, const Decisions& decisions);
// The most elements in a parameter slot, for all that share it: offload_param.buffer_size, even if
// a slice has more. If it is not given, there is room for each.
int64_t SlotElementsMax(const Config& config, const ModelLayout& layout,
                        const Decisions& decisions);

}  // namespace ebb::sharding
