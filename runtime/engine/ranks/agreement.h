// Agreement between ranks outside a step: before they train together, and after something went
// wrong.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/outcome/exchange.h"
#include "ebb/runtime/engine/ranks/host_lane.h"
#include "ebb/sharding/model.h"

namespace ebb {

// Every rank's `value`, by rank. Blocks.
absl::StatusOr<std::vector<int64_t>> AllValues(const HostLane& lane, int64_t value);
// Every rank's values, rank after rank; ranks may have different numbers of values. Blocks.
absl::StatusOr<std::vector<std::vector<int64_t>>> AllLists(const HostLane& lane,
                                                           std::span<const int64_t> values);

// Every rank's text, whole, by rank. Blocks.
absl::StatusOr<std::vector<std::string>> AllTexts(const HostLane& lane, std::string_view text);

// Every rank's record, by rank. Blocks.
absl::Status GatherRecords(const HostLane& lane, const ExchangeRecord& own,
                           std::span<ExchangeRecord> all);

// OK if every rank passed OK; else this rank's own error, or the whole error of the first rank that
// has one, with that rank's name. Blocks.
absl::Status AgreeOnStatus(const HostLane& lane, const absl::Status& own);

// Agrees on errors that take a while to explain. Among the ranks that pass the same `cause` the
// first calls `advise` and adds the returned text behind "; "; all of them get its error. Cause 0:
// there is nothing to add. The others wait as long as for any collective: after that, or where a
// rank has gone, their errors are as passed. If all pass OK no more is exchanged.
absl::Status AgreeOnStatus(const HostLane& lane, const absl::Status& own, int64_t cause,
                           absl::FunctionRef<std::string()> advise);

// Refuses ranks that differ in model, config, optimizer or plans (RunnablePlans::Fingerprint), and
// names the first difference.
absl::Status AgreeOnPlans(const HostLane& lane, const EngineInputs& inputs, uint64_t plans);

// Refuses ranks of a part of which some alone have a verdict, or one of other ranks.
absl::Status AgreeThatVerdictIsGiven(const HostLane& lane, const std::optional<World>& verdict);

// Among the ranks of EngineInputs::verdict, which are the parts of one model over tensor. An error
// in `planned`, this rank's result of Create so far, is every rank's. Refuses parts that differ in
// more than the shapes of their own parameters. `given`: the config before "auto" was chosen.
absl::StatusOr<VerdictRanks> AgreeOnVerdict(const HostLane& lane, const EngineInputs& inputs,
                                            const Config& given, const absl::Status& planned);

// Refuses parts with different first values of parameters that are whole over tensor. `filled`: by
// parameter, a hash of this rank's slice.
absl::Status AgreeOnReplicas(const HostLane& lane, const VerdictRanks& ranks,
                             const ModelSpec& model, std::span<const int64_t> filled);

// Refuses ranks that ask for different orders of the same units, and names the first difference.
absl::Status AgreeOnOrder(const HostLane& lane, const ModelSpec& model, uint64_t plans);

// Refuses ranks with different initialisers, by the first values of every parameter: a seed that
// depends on the rank is the usual mistake. `of_rank_0`: EngineOptions::initial_values_of_rank_0.
// All ranks must give the same.
absl::Status AgreeOnInitialValues(const HostLane& lane, const ModelSpec& model, bool of_rank_0);

}  // namespace ebb
