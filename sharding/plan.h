// The plan of a step, as data. For each scope that the trainer opens or closes it has the
// operations that are issued, their streams, their bytes, and the addresses of everything. The
// waits between operations follow from that (instructions.h). The engine runs the fragments that
// it becomes, the memory model adds it up, tests check its laws without running anything:
//   - nothing is used before it is there, and no two live things overlap in a pool;
//   - a unit has one gathered address, in forward, backward and every step; so has the gradient of
//     a unit (reduce_at round) or of a visit (reduce_at step);
//   - every visit's gradient is reduced exactly once;
//   - the bytes of all ranks' operations are what ring collectives move.
//
// A plan is the same on every rank, and has three rounds at most. The middle one stands for all
// rounds of a longer step but the first and the last, because each finds and leaves the same
// contents in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <numeric>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/operands.h"
#include "ebb/sharding/place.h"
#include "ebb/sharding/placement.h"
#include "ebb/sharding/scopes.h"
#include "ebb/sharding/slots.h"
#include "ebb/sharding/state.h"

namespace ebb::sharding {

enum class OperationKind : uint8_t {
  kMark,    // compute: work that a trainer enqueues outside of scopes: losses
  kGather,  // all-gather of units from their slices into their slots
  // ZeRO++'s hpZ: this rank's part of units just gathered, into its secondary shards; all-gather of
  // units from those, within the ranks that hold a copy of them together
  kFillSecondary,
  kGatherSecondary,
  kCast,        // whole gradients from the accumulation to the communication dtype, into staging
  kReduce,      // reduce-scatter of whole gradients, divided (with replicas: only summed)
  kAllReduce,   // replicas: sums the reduced slices over the shard groups, divided
  kRound,       // replicas: the slices from fp32 to the communication dtype
  kAccumulate,  // adds the reduced slice to the shard; the last one takes the norm's squares
  // The squares of a shard that kReduce wrote itself; of all at Finish if a step holds updates.
  kNorm,
  kGatherGradient,  // stage 0: the reduced gradient whole on every rank
  kSeal,            // this rank's record: norm, overflow, loss, scope hash and errors
  kExchange,        // all-gather of the records of all ranks
  kConclude,        // the verdict that follows from them: constants of updates, loss scale
  kParameterNorms,  // of a sub-group: what LAMB and LARS know of whole parameters before an update
  kSealNorms,       // this rank's record of them
  kExchangeNorms,   // all-gather of the records of a shard group
  kConcludeNorms,   // the constants that follow from them
  kCopyControl,     // records, norms and constants, between the control block and the device
  kUpdate,          // the optimizer, one sub-group of a unit
  kRefresh,         // all-gather of updated parameters of units that are kept whole
  kRead,            // moves from the swap file to host memory
  kUpload,          // moves from host memory to the device
  kDownload,        // moves from the device to host memory
  kWrite,           // moves from host memory to the swap file
  kCastMasters,     // low-precision copies of masters in host memory, for a gather
};
inline constexpr int kOperationKinds = 26;
std::string_view Name(OperationKind kind);

enum class StreamId : uint8_t {
  kCompute,
  kGather,
  kReduce,
  kUpdate,  // on the device
  // Streams of offloaded data. Reads of parameters have a stream of their own, because reads of
  // states wait for updates.
  kUpload,
  kDownload,
  kHostSum,     // sums and norms of gradients that live in host memory
  kHostUpdate,  // on the processor, of masters and states that are not on the device
  kReadParameters,
  kReadStates,
  kWrite,
};
inline constexpr int kStreams = 11;
std::string_view Name(StreamId stream);

struct Part {
  int unit = 0;
  int scope = -1;  // of the step; -1 where the operation is not a scope's
  // kAccumulate: the shard's first contribution of the step, which overwrites. kParameterNorms: the
  // first of its stream, likewise.
  bool first = false;
  bool last = false;  // kAccumulate, kNorm: the gradient is final
  friend bool operator==(const Part&, const Part&) = default;
  template <class H>
  friend H AbslHashValue(H hash, const Part& part) {
    return H::combine(std::move(hash), part.unit, part.scope, part.first, part.last);
  }
};

// Whether an operation runs depends on whether updates of the step before are still to be done.
enum class Condition : uint8_t { kAlways, kCarrying, kNotCarrying };

// An operation's lists are in Plan::lists.
struct Operation {
  OperationKind kind{};
  StreamId stream{};
  Condition condition = Condition::kAlways;
  int64_t bytes = 0;  // collectives: received from or sent to other ranks; else read and written
  std::span<const Part> parts;  // units of a bucket
  std::span<const Operand>
      operands;                 // all that it touches, in the order of its code (instructions.h)
  std::span<const Move> moves;  // kRead, kUpload, kDownload, kWrite: the same by class of state
  std::span<const UpdateDetail> updates;  // kUpdate, kParameterNorms, kCastMasters: by sub-group
};

struct Moment {
  enum Kind : uint8_t { kBegin, kOpen, kClose, kFinish };
  Kind kind = kBegin;
  int scope = -1;
  int begin = 0, end = 0;  // operations issued now, in their order
  auto operations() const { return std::views::iota(begin, end); }
};

struct PlanLists;

// Bytes from the start of the class's pool.
struct UnitAddresses {
  int64_t parameter_trainable = 0,
          parameter_frozen = 0;  // parameter pool: whole, or this rank's slice
  // Gradients of the tier UnitPlacement::gradient, pool or swap file.
  int64_t gradient_shard = 0;                       // gradient pool of UnitPlacement::gradient
  int64_t gather_trainable = 0, gather_frozen = 0;  // gather pool; unused for a unit kept whole
  // Secondary pool; unused for a unit that a step gathers once, or not at all.
  int64_t secondary_trainable = 0, secondary_frozen = 0;
};
struct VisitAddresses {
  int64_t gradient = 0;  // gradient pool: the whole gradient that backward writes
  int64_t output = 0;    // activation pool: micro-batch i of a round at + i * boundary_stride
  int64_t output_gradient = 0;  // likewise
  int64_t boundary_stride = 0;
  bool leaves = false;  // the device, between forward and backward, for its ...
  Place place;          // ... of all micro-batches of a round
};

struct Pools {
  std::vector<UnitAddresses> units;
  std::vector<VisitAddresses> visits;
  int64_t bytes[kStateClasses] = {};       // of each class, on the device
  int64_t host_bytes[kStateClasses] = {};  // in host memory
  int64_t file_bytes[kStateClasses] = {};  // in the swap file, end to end
  // The states file, which holds all classes but parameters.
  int64_t state_file_bytes() const {
    return std::accumulate(std::begin(file_bytes), std::end(file_bytes),
                           -file_bytes[static_cast<int>(StateClass::kParameter)]);
  }
  StatePlacement placement;
  SlotRing parameter_slots;  // host: of one group of gathers each
  SlotRing gradient_slots;   // host: of one unit's reduced shard each
  SlotRing boundary_slots;   // host: of one boundary each
  // Host: of the masters of one sub-group each, which stay from a unit's last gather to its update.
  SlotRing master_slots;
  WorkSlots host_work, device_work;  // of one sub-group each
  // Host: reduced slices of one bucket on their way to shards that live there.
  Place landing;
  // The place of a unit's reduced shard.
  Place GradientShard(int unit) const {
    return {.tier = placement.units[static_cast<size_t>(unit)].gradient,
            .pool = StateClass::kGradient,
            .offset = units[static_cast<size_t>(unit)].gradient_shard};
  }
  int64_t staging_cast = 0;      // staging pool: casts of one bucket
  int64_t staging_rounded = 0;   // kRound's slices of one bucket
  int64_t staging_norm = 0;      // scratch of optim::SumOfSquares
  int64_t staging_exchange = 0;  // one record of kExchangeBytes per rank, then this rank's own
  // For optimizers that take norms (norm_records.h): sums of this rank's parameters, and records of
  // all ranks of a shard group, then this rank's own. Sums from updates on the host are in host
  // memory.
  int64_t staging_norm_sums = 0, staging_norm_records = 0;
  Place host_norm_sums;
  // Where pieces of all ranks are summed in one order (ebb.deterministic_reduce).
  int64_t staging_sums = 0, staging_sums_bytes = 0;
  // fp32 gradient of one slice, and where masters are not kept as such their fp32 values, for an
  // optimizer of the trainer's
  int64_t staging_gradient = 0, staging_master = 0;
  // Places on the host for updates there.
  Place host_norm, host_gradient, host_master;
  // Activation pool in an evaluation, which keeps nothing for backward: two boundaries a
  // micro-batch, taken by visits in turns, and the most micro-batches that one walk holds.
  int64_t evaluation_stride = 0, evaluation_micro_batches = 0;
};
// With room for an error that names a path and what to do.
inline constexpr int64_t kExchangeBytes = 512;

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
  bool sums_in_scratch = false;  // ebb.deterministic_reduce, of several ranks
  int optimizer_states = 0;
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
  bool reads_any_parameters() const { return MostOfUnits(&Decisions::reads_parameters); }
  // Bytes of an element beside the parameter.
  int64_t master_size(int unit) const {
    return !reads_parameters(unit) ? 4 : stochastic_rounding ? 0 : 2;
  }
  int64_t state_bytes(int unit) const { return master_size(unit) + 4 * optimizer_states; }
  // The most that a trainable unit has of something.
  template <class Number>
  Number MostOfUnits(Number (Decisions::*of)(int) const) const {
    Number most{};
    for (int unit = 0; unit < static_cast<int>(trainable.size()); ++unit)
      if (trainable[static_cast<size_t>(unit)]) most = std::max(most, (this->*of)(unit));
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
  DType shard_dtype(int unit) const {
    return accumulates[unit] ? accumulation : communication_of(unit);
  }
};

inline constexpr int kPlannedRounds = 3;

struct Plan {
  Decisions decisions;
  int step_rounds =
      1;  // of the step: those between the first and the last are the planned one again
  ModelLayout layout;
  Pools pools;
  std::vector<PlannedScope> scopes;
  std::vector<Operation> operations;
  std::shared_ptr<const PlanLists> lists;  // of operations and moments; copies of a plan share them
  std::vector<Moment> moments;             // kBegin; by tick kOpen or kClose of a scope; kFinish
  std::vector<int> gather_of_scope;        // the gather that serves scope s; -1: kept whole
  bool carries_updates = false;            // some operations are updates that the step before left
  std::vector<std::string> unit_names;

  // Operations of the round that a longer step has again.
  std::span<const Operation> MiddleRound() const;
  // In a step of this many rounds, where the plan is one of it; 0: step_rounds.
  int64_t BytesOf(OperationKind kind, int rounds = 0) const;
  // Bytes that the plan itself takes in RAM.
  int64_t OwnBytes() const;
};

struct MemoryCaps;

struct PlanInputs {
  const ModelSpec* model = nullptr;
  const Config* config = nullptr;  // resolved for the world (Config::ForWorld)
  int world = 1;
  int optimizer_states = 0;
  bool own_optimizer = false;
  // Where state lives that is there already; null: it is decided.
  const StatePlacement* placement = nullptr;
  // How detailed the error of a cap is: the total need; also the need of each class; also a config
  // that would fit, which takes longer to find than the plan.
  enum class CapError : uint8_t { kNeed, kClasses, kAdvice };
  CapError cap_error = CapError::kAdvice;
  // Sums over ranks depend on how many collectives are grouped (NCCL's, without
  // ebb.deterministic_reduce): then such a change is advised only where nothing else fits.
  bool sums_depend_on_groups = false;
};

// The plan of a step of `rounds` rounds (0: the config's). hold_updates: nothing is updated before
// Finish. Every variant has the same pools. Errors: the model's or the config's, and rounds that
// the config's pools do not hold; kResourceExhausted is a cap of the config's, and nothing else.
absl::StatusOr<Plan> PlanStep(const PlanInputs& inputs, int rounds = 0, bool hold_updates = false);
// PlanStep with every round planned, to check the middle round of a shorter plan.
absl::StatusOr<Plan> PlanUnrolledStep(const PlanInputs& inputs, int rounds,
                                      bool hold_updates = false);
// One walk of an evaluation: its moments are of forward scopes only, and kFinish.
absl::StatusOr<Plan> PlanWalk(const PlanInputs& inputs);
// Only the updates that a step carries into the next one: for a look at the state before that step.
absl::StatusOr<Plan> PlanDrain(const PlanInputs& inputs);
// The pools alone, which take a small part of a plan's time. Unlike a plan, they may exceed a cap
// of the config (CheckBudget). Free host memory stays free.
absl::StatusOr<Pools> PlanPools(const PlanInputs& inputs);
// LeastPools of these inputs: what exceeds a cap with these does with PlanPools(), which may take
// much longer.
absl::StatusOr<Pools> PlanLeastPools(const PlanInputs& inputs);

}  // namespace ebb::sharding
