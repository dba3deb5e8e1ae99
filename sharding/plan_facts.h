// Facts that an engine asks of a plan beside its operations. They hold for every step of the
// plan.
#pragma once

#include <vector>

#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/place.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb::sharding {

// Rounds that are planned. A longer step repeats the middle round.
inline int PlannedRounds(const Plan& plan) {
  return plan.decisions.rounds;
}
// The number of ranks that each unit is cut over. If it is less than all ranks, shards are
// repeated, and the first ranks' shards count once.
inline int Slices(const Plan& plan) {
  return plan.decisions.shards;
}
// The rank's own slice of the data at `place`; the rank has slice `slice` of every unit.
inline Place OwnPlace(const Plan& plan, const Place& place, int slice) {
  Place own = place.Plus((place.of_secondary ? slice % plan.decisions.secondary_shards : slice) *
                         place.per_slice);
  own.per_slice = 0;
  return own;
}

inline UpdateTiming TimingOf(const Plan& plan) {
  return plan.decisions.timing;
}
// Steps leave updates to the step after them.
inline bool CarriesUpdates(const Plan& plan) {
  return plan.carries_updates;
}
// Some updates read the parameters, because these are masters or halves of them.
inline bool UpdatesReadParameters(const Plan& plan) {
  return plan.decisions.reads_any_parameters();
}
// A unit's masters, whole or half, are kept beside its parameters; else parameters are their own
// masters.
inline bool HasMasters(const Plan& plan, int unit) {
  return plan.decisions.writes_parameters(unit);
}
// A unit's parameters are copies of masters in another dtype, or elsewhere.
inline bool CopiesMasters(const Plan& plan, int unit) {
  return CastsMasters(plan.decisions, unit);
}
inline bool IsKeptWhole(const Plan& plan, int unit) {
  return plan.decisions.kept_whole[unit];
}

inline DType BoundaryDType(const Plan& plan) {
  return plan.decisions.compute;
}
// The dtypes of the views that scopes of a unit show.
inline DType ParameterDType(const Plan& plan, int unit) {
  return plan.decisions.compute_of(unit);
}
inline DType GradientDType(const Plan& plan, int unit) {
  return plan.decisions.gradient_of(unit);
}
inline int MicroBatchesOfRound(const Plan& plan) {
  return static_cast<int>(plan.decisions.micro_batches_per_round);
}
// Backward sums a visit's gradient over all rounds, and the last round reduces it; else each does.
inline bool SumsOverRounds(const Plan& plan) {
  return plan.decisions.keeps_step_gradients;
}
// The whole gradient of a visit, as a number: visits with the same number share one address.
inline int WholeGradientOf(const Plan& plan, int visit, int unit) {
  return GradientKey(plan.decisions, {.visit = visit, .unit = unit});
}
inline int WholeGradients(const Plan& plan) {
  return SumsOverRounds(plan) ? plan.table.visits : plan.table.units;
}

// Where a unit is whole while it is used, and where backward writes the gradient of a visit.
inline Place WholePlace(const Plan& plan, int unit, bool trainable) {
  return plan.table.PlaceOf(WholeRow(plan.table, unit, trainable));
}
inline Place WholeGradientPlace(const Plan& plan, int visit, int unit) {
  return plan.table.PlaceOf(
      plan.table.Find(Purpose::kGradient, WholeGradientOf(plan, visit, unit)));
}

// The output of a visit, or its gradient, of a micro-batch of a round, and in an evaluation.
inline Place OutputPlace(const Plan& plan, int visit, bool is_gradient, int index_in_round) {
  const Purpose purpose = is_gradient ? Purpose::kOutputGradient : Purpose::kOutput;
  return plan.table.TurnOf(plan.table.Find(purpose, visit), index_in_round);
}
// `boundary`: counts the visits that boundaries pass through.
inline Place WalkOutputPlace(const Plan& plan, int boundary, int micro_batch) {
  return plan.table.TurnOf(plan.table.Find(Purpose::kWalkOutputs), 2 * micro_batch + boundary % 2);
}

inline NormRecords NormRecordsOf(const Plan& plan) {
  return LayOutNormRecords(plan.layout, plan.decisions);
}
inline int NormEntryOf(const Plan& plan, int unit, int slice, ParameterId parameter) {
  return NormEntryOf(plan.layout.units[unit].trainable, plan.decisions, slice, parameter);
}

}  // namespace ebb::sharding
