#include "ebb/sharding/plan_facts.h"

#include "ebb/sharding/reduction.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb::sharding {

int PlannedRounds(const Plan& plan) {
  return plan.decisions.rounds;
}

int Slices(const Plan& plan) {
  return plan.decisions.shards;
}

Place OwnPlace(const Plan& plan, const Place& place, int slice) {
  Place own = place.Plus((place.of_secondary ? slice % plan.decisions.secondary_shards : slice) *
                         place.per_slice);
  own.per_slice = 0;
  return own;
}

int SecondarySlices(const Plan& plan) {
  return plan.decisions.secondary_shards;
}

bool HasMasters(const Plan& plan, int unit) {
  return plan.decisions.writes_parameters(unit);
}

bool CopiesMasters(const Plan& plan, int unit) {
  return CastsMasters(plan.decisions, unit);
}

bool RoundsStochastically(const Plan& plan) {
  return plan.decisions.stochastic_rounding;
}

bool ParametersAreOnDevice(const Plan& plan) {
  return plan.decisions.parameter_tier == Tier::kDevice;
}

bool UpdatesReadParameters(const Plan& plan) {
  return plan.decisions.reads_any_parameters();
}

bool HasTiersBelow(const Plan& plan) {
  return plan.decisions.offloads();
}

UpdateTiming TimingOf(const Plan& plan) {
  return plan.decisions.timing;
}

bool CarriesUpdates(const Plan& plan) {
  return plan.decisions.carries();
}

DType BoundaryDType(const Plan& plan) {
  return plan.decisions.compute;
}

DType ParameterDType(const Plan& plan, int unit) {
  return plan.decisions.compute_of(unit);
}

DType GradientDType(const Plan& plan, int unit) {
  return plan.decisions.gradient_of(unit);
}

int MicroBatchesOfRound(const Plan& plan) {
  return static_cast<int>(plan.decisions.micro_batches_per_round);
}

bool IsKeptWhole(const Plan& plan, int unit) {
  return plan.decisions.kept_whole[static_cast<size_t>(unit)];
}

const std::vector<bool>& TrainableUnits(const Plan& plan) {
  return plan.decisions.trainable;
}

bool SumsOverRounds(const Plan& plan) {
  return plan.decisions.keeps_step_gradients;
}

int WholeGradients(const Plan& plan) {
  return static_cast<int>(plan.decisions.keeps_step_gradients ? plan.pools.visits.size()
                                                              : plan.pools.units.size());
}

int WholeGradientOf(const Plan& plan, int visit, int unit) {
  return GradientKey(plan.decisions, {.visit = visit, .unit = unit});
}

Place WholeGradientPlace(const Plan& plan, int visit) {
  return {.pool = StateClass::kGradient,
          .offset = plan.pools.visits[static_cast<size_t>(visit)].gradient};
}

Place OutputPlace(const Plan& plan, int visit, int index_in_round) {
  const VisitAddresses& at = plan.pools.visits[static_cast<size_t>(visit)];
  return {.pool = StateClass::kActivation,
          .offset = at.output + index_in_round * at.boundary_stride};
}

Place OutputGradientPlace(const Plan& plan, int visit, int index_in_round) {
  const VisitAddresses& at = plan.pools.visits[static_cast<size_t>(visit)];
  return {.pool = StateClass::kActivation,
          .offset = at.output_gradient + index_in_round * at.boundary_stride};
}

Place WalkOutputPlace(const Plan& plan, int visit, int micro_batch) {
  return {.pool = StateClass::kActivation,
          .offset = plan.pools.EvaluationOutput(visit, micro_batch)};
}

bool HasNorms(const Plan& plan) {
  return plan.decisions.has_norms();
}

NormRecords NormRecordsOf(const Plan& plan) {
  return LayOutNormRecords(plan.layout, plan.decisions);
}

int NormEntryOf(const Plan& plan, int unit, int slice, ParameterId parameter) {
  return NormEntryOf(plan.layout.units[static_cast<size_t>(unit)].trainable, plan.decisions, slice,
                     parameter);
}

}  // namespace ebb::sharding
