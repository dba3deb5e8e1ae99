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
#include "ebb/sharding/decisions.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/operands.h"
#include "ebb/sharding/place.h"
#include "ebb/sharding/placement.h"
#include "ebb/sharding/scopes.h"
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
  int64_t staging_exchange = 0;  // one record of RecordBytes per rank, then this rank's own
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
// A record without squares, with room for an error that names a path and what to do.
inline constexpr int64_t kExchangeBytes = 512;
// A rank's record: behind the bytes above, the squares of Decisions::compared.
inline int64_t RecordBytes(const Decisions& d) {
  return kExchangeBytes + std::ssize(d.compared) * 8;
}

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
  int world = 1;                   // data ranks
  int verdict_ranks = 0;           // Decisions::verdict_ranks; 0: the world
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
