// The exchanges of records between ranks, at the end of a step or evaluation and before LAMB and
// LARS update. Each rank writes a record, and concludes from the records of all ranks.
//
//   seal -> copy control -> exchange -> copy control -> conclude -> copy control
//   record   to the device   all-gather   to the host     constants     to the device
#pragma once

#include "ebb/sharding/lower/plan_writer.h"

namespace ebb::sharding {

void ExchangeRecords(const Plan& plan, PlanWriter& writer);
void ExchangeNorms(const Plan& plan, PlanWriter& writer);

// This rank's sums of parameters, which the device or the host updates.
Place NormSums(const Plan& plan, bool on_host);

}  // namespace ebb::sharding
