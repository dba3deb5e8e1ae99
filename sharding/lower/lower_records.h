// Records of the ranks as operations: at the end of a step or evaluation, and before LAMB and LARS
// update.
#pragma once

#include "ebb/sharding/lower/emit.h"
#include "ebb/sharding/lower/op_writer.h"
#include "ebb/sharding/place.h"

namespace ebb::sharding {

// The constants of updates that do not wait for their step's verdict.
void PrepareConstants(OpWriter& writer);

// The exchanges of records between ranks, at the end of a step or evaluation and before LAMB and
// LARS update. Each rank writes a record, and concludes from the records of all ranks.
//
//   seal -> copy control -> exchange -> copy control -> conclude -> copy control
//   record   to the device   all-gather   to the host     constants     to the device
void ExchangeRecords(const Plan& plan, OpWriter& writer);
void ExchangeNorms(const Plan& plan, OpWriter& writer);

// This rank's sums of parameters, which the device or the host updates.
Place NormSums(const Plan& plan, bool on_host);

}  // namespace ebb::sharding
