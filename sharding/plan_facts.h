// Facts that an engine asks of a plan beside its operations. They hold for every step of the plan.
#pragma once

#include <vector>

#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/place.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// Rounds that are planned. A longer step repeats the middle round.
int PlannedRounds(const Plan& plan);

// The number of ranks that each unit is cut over. If it is less than all ranks, slices are
// repeated, and those of the first ranks count once.
int Slices(const Plan& plan);
inline int SliceOf(const Plan& plan, int rank) {
  return rank % Slices(plan);
}
// The rank's own part of what lies at `place` by slices; the rank has slice `slice` of every unit.
Place OwnPlace(const Plan& plan, const Place& place, int slice);
// Parts of each unit's secondary copy (hpZ), one for each rank of a group; 0: there is none.
int SecondarySlices(const Plan& plan);
// A unit's masters, whole or half, are kept beside its parameters; else parameters are their own masters.
bool HasMasters(const Plan& plan, int unit);
// A unit's parameters are copies of masters in another dtype, or elsewhere.
bool CopiesMasters(const Plan& plan, int unit);
bool RoundsStochastically(const Plan& plan);
// Parameters that are cut over ranks are on the device.
bool ParametersAreOnDevice(const Plan& plan);
// Some updates read the parameters, because these are masters or halves of them.
bool UpdatesReadParameters(const Plan& plan);
// Some class of state may live below the device.
bool HasTiersBelow(const Plan& plan);

UpdateTiming TimingOf(const Plan& plan);
// Steps leave updates to the step after them.
bool CarriesUpdates(const Plan& plan);

DType BoundaryDType(const Plan& plan);
// The dtypes that scopes of a unit show.
DType ParameterDType(const Plan& plan, int unit);
DType GradientDType(const Plan& plan, int unit);
int MicroBatchesOfRound(const Plan& plan);
bool IsKeptWhole(const Plan& plan, int unit);
const std::vector<bool>& TrainableUnits(const Plan& plan);  // by unit
// Backward sums a visit's gradient over all rounds, and the last round reduces it; else each does.
bool SumsOverRounds(const Plan& plan);
// The whole gradient of a visit, as a number: visits with the same number share one address.
int WholeGradients(const Plan& plan);
int WholeGradientOf(const Plan& plan, int visit, int unit);

// On the device, for scopes' views: a visit's whole gradient; boundaries of its micro-batches, of a round or walk.
Place WholeGradientPlace(const Plan& plan, int visit);
Place OutputPlace(const Plan& plan, int visit, int index_in_round);
Place OutputGradientPlace(const Plan& plan, int visit, int index_in_round);
Place WalkOutputPlace(const Plan& plan, int visit, int micro_batch);
// In the device's staging pool, at an address of Pools.
inline Place StagingPlace(int64_t offset) {
  return {.pool = StateClass::kStaging, .offset = offset};
}

// Some optimizer takes norms of whole parameters.
bool HasNorms(const Plan& plan);
NormRecords NormRecordsOf(const Plan& plan);
int NormEntryOf(const Plan& plan, int unit, int slice, ParameterId parameter);

}  // namespace ebb::sharding
