// What a step moves between tiers, for people: the rows, and what they are worth beside the least
// that is possible and beside DeepSpeed's scheme.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/sharding/state.h"

namespace ebb::gpt {

// Bytes that a step reads and writes on NVMe, per parameter, with nothing kept in RAM. Nothing
// where neither parameters nor states are there, or where these schemes do not apply: another
// optimizer than Adam, or fp32 compute.
//
// Least: without loss, each unit fetched twice a step: of states two fp32 moments and what the
// master has beyond the parameter (16 bits in bf16, where that suffices; all 32 in fp16), both
// ways; of parameters in bf16 two reads and one write, which the update's own pass over them
// shares; in fp16 one read, as the other visit takes its copy from the new masters.
std::optional<double> LeastBytes(const Config& config);
// Masters, moments and gradients in fp32, both ways; parameters twice a micro-batch and written
// once.
std::optional<double> DeepSpeedBytes(const Config& config);

// A row for each of `rows`, and the NVMe's sum beside both. `parameters` are this rank's own. Not
// counted: what is predicted alone.
std::string TrafficTable(const std::vector<TrafficRow>& rows, const Config& config,
                         int64_t parameters, bool counted = true);

}  // namespace ebb::gpt
