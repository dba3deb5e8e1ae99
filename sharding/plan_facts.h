// What an engine asks of a plan beside its operations: what holds for every step that it is the plan of.
#pragma once

#include <vector>

#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/place.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// Rounds that are planned: a longer step has that in the middle again.
int PlannedRounds(const Plan& plan);

// Ranks that each unit is cut over. Fewer than all: the slices are repeated, and those of the first so many ranks count
// once.
int Slices(const Plan& plan);
inline int SliceOf(const Plan& plan, int rank) {
  return rank % Slices(plan);
}
// Where the rank that has slice `slice` of every unit finds its own of what lies at `place` by slices.
Place OwnPlace(const Plan& plan, const Place& place, int slice);
// Every rank updates all elements, and not its slice alone.
bool UpdatesWhole(const Plan& plan);
// Parts of a secondary copy of each unit (hpZ), a rank of its group each; 0: there is none.
int SecondarySlices(const Plan& plan);
// Masters are kept beside parameters, or a half of each; else parameters are their own masters.
bool HasMasters(const Plan& plan);
// Parameters are copies of masters in another dtype.
bool CopiesMasters(const Plan& plan);
// Of what is shown as masters.
DType MasterDType(const Plan& plan);
bool RoundsStochastically(const Plan& plan);
// Parameters that are cut are on the device.
bool ParametersAreOnDevice(const Plan& plan);
// Updates read the parameters, which are masters or halves of them.
bool UpdatesReadParameters(const Plan& plan);
// Some class of state may live below the device.
bool HasTiersBelow(const Plan& plan);

UpdateTiming TimingOf(const Plan& plan);
// Steps leave updates to the step after them.
bool CarriesUpdates(const Plan& plan);

// Of what scopes show.
DType ParameterDType(const Plan& plan);
DType GradientDType(const Plan& plan);
int MicroBatchesOfRound(const Plan& plan);
bool IsKeptWhole(const Plan& plan, int unit);
const std::vector<bool>& TrainableUnits(const Plan& plan);  // by unit
// Backward sums a visit's gradient over all rounds, so that it is reduced in the last one; else in each.
bool SumsOverRounds(const Plan& plan);
// Which of so many whole gradients that of a visit is: visits that have the same share one address.
int WholeGradients(const Plan& plan);
int WholeGradientOf(const Plan& plan, int visit, int unit);

// On the device: the whole gradient of a visit, and boundaries of the visit's micro-batches, of a round or of a walk.
Place WholeGradientPlace(const Plan& plan, int visit);
Place OutputPlace(const Plan& plan, int visit, int index_in_round);
Place OutputGradientPlace(const Plan& plan, int visit, int index_in_round);
Place WalkOutputPlace(const Plan& plan, int visit, int micro_batch);
// The records of all ranks, and this rank's own behind them.
Place RecordsPlace(const Plan& plan);
// In the device's staging pool, at an address of Pools.
inline Place StagingPlace(int64_t offset) {
  return {.pool = StateClass::kStaging, .offset = offset};
}

// Of optimizers that take norms of whole parameters.
bool HasNorms(const Plan& plan);
NormRecords NormRecordsOf(const Plan& plan);
int NormEntryOf(const Plan& plan, int unit, int slice, ParameterId parameter);

}  // namespace ebb::sharding
