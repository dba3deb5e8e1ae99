// The plan of a step, as data. For each scope that the trainer opens or closes it has the
// operations that are issued, their streams, their bytes, and the addresses of everything. The
// waits between operations follow from that (waits.h). The engine runs the lists that it becomes,
// the memory model adds it up, tests check its laws without running anything:
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
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/decisions.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/op_list.h"
#include "ebb/sharding/place.h"
#include "ebb/sharding/placement.h"
#include "ebb/sharding/scopes.h"
#include "ebb/sharding/state.h"
#include "ebb/sharding/table.h"

namespace ebb::sharding {

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
  std::vector<Op> ops;                     // of steps with and without carried updates (Op::when)
  std::shared_ptr<const OpMemory> memory;  // of operations; copies of a plan share it
  std::vector<Moment> moments;             // kBegin; by tick kOpen or kClose of a scope; kFinish
  std::vector<int> gather_of_scope;  // the number of the gather that serves scope s; -1: kept whole
  bool carries_updates = false;      // some operations are updates that the step before left
  std::vector<std::string> unit_names;

  // Operations of the round that a longer step has again.
  std::span<const Op> MiddleRound() const;
  // In a step of this many rounds, where the plan is one of it; 0: step_rounds.
  int64_t BytesOf(Role role, int rounds = 0) const;
  // How many operations tables list.
  int64_t Shown() const;
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
  std::vector<Encoding> state_encodings = {};  // as Decisions::state_encodings
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

// The list of a step, without waits. `carrying`: the step before has left updates to it.
OpList ListOf(const Plan& plan, bool carrying);

}  // namespace ebb::sharding
