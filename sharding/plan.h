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
#include <memory>
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
#include "ebb/sharding/table.h"

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
      operands;  // all that it touches, in the order of its code (instructions.h)
  std::span<const UpdateDetail> updates;  // kUpdate, kParameterNorms, kCastMasters: by sub-group

  // kRead, kUpload, kDownload, kWrite: their operands are pairs, from and to.
  auto moves() const {
    using enum OperationKind;
    const bool any = kind == kRead || kind == kUpload || kind == kDownload || kind == kWrite;
    return std::views::iota(size_t{0}, any ? operands.size() / 2 : 0) |
           std::views::transform([of = operands](size_t i) {
             const Operand &from = of[2 * i], &to = of[2 * i + 1];
             return Move{from.content, from.place, to.place, from.bytes()};
           });
  }
};

struct Moment {
  enum Kind : uint8_t { kBegin, kOpen, kClose, kFinish };
  Kind kind = kBegin;
  int scope = -1;
  int begin = 0, end = 0;  // operations issued now, in their order
  auto operations() const { return std::views::iota(begin, end); }
};

struct PlanLists;

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
  Table table;  // of all arrays, with their places
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

// Gradients with one key share one address.
inline int GradientKey(const Decisions& decisions, const PlannedScope& scope) {
  return decisions.keeps_step_gradients ? scope.visit : scope.unit;
}

inline const Section& SectionOf(const Plan& plan, int unit, bool trainable) {
  return SectionOf(plan.layout, unit, trainable);
}

// Elements of a unit's trainable section that a rank updates: its slice; at stage 0 the whole
// section, because every rank updates all of it.
struct UpdatedElements {
  int64_t begin = 0, count = 0;
};
inline UpdatedElements UpdatedBy(const Plan& plan, int unit, int slice) {
  const Section& section = SectionOf(plan, unit, true);
  if (plan.decisions.stage == 0) return {0, section.elements};
  return {slice * section.shard, section.shard};
}

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
// Finish. Every variant has the same table. Errors: the model's or the config's, and rounds that
// the config's pools do not hold; kResourceExhausted is a cap of the config's, and nothing else.
absl::StatusOr<Plan> PlanStep(const PlanInputs& inputs, int rounds = 0, bool hold_updates = false);
// PlanStep with every round planned, to check the middle round of a shorter plan.
absl::StatusOr<Plan> PlanUnrolledStep(const PlanInputs& inputs, int rounds,
                                      bool hold_updates = false);
// One walk of an evaluation: its moments are of forward scopes only, and kFinish.
absl::StatusOr<Plan> PlanWalk(const PlanInputs& inputs);
// Only the updates that a step carries into the next one: for a look at the state before that step.
absl::StatusOr<Plan> PlanDrain(const PlanInputs& inputs);
// The table alone, which takes a small part of a plan's time. Unlike a plan's, its pools may exceed a
// cap of the config (CheckBudget). Free host memory stays free.
absl::StatusOr<Table> PlanTable(const PlanInputs& inputs);
// LeastTable of these inputs: what exceeds a cap with this one does with PlanTable(), which may take
// much longer.
absl::StatusOr<Table> PlanLeastTable(const PlanInputs& inputs);

}  // namespace ebb::sharding
