// Messages about steps that failed or were skipped. Pure: from records and logs of ranks to text.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/runtime/engine/outcome/exchange.h"
#include "ebb/sharding/model.h"

namespace ebb {

class OutcomeMessages {
 public:
  // `me`: in the ranks of a verdict, `caller`: in those that make calls together. `model`: borrowed.
  OutcomeMessages(std::string engine, WorldRank me, WorldRank caller, const ModelSpec& model)
      : engine_(std::move(engine)), me_(std::move(me)), caller_(std::move(caller)), model_(model) {}

  std::string ScopeName(sharding::ScopeKind kind, int unit) const;
  std::string ScopeName(int64_t code) const;  // as a log names it
  std::string Skipped(const Verdict& ranks, const StepReport& report, float next_loss_scale) const;
  absl::Status OtherScopes(const Verdict& ranks) const;
  absl::Status OtherRates(const Verdict& ranks) const;
  absl::Status Overflowed(const Verdict& ranks) const;  // if overflows are not checked
  absl::Status ReplicasDiffer(const ReplicaDifference& replicas) const;
  absl::Status LossesDiffer(const LossDifference& losses) const;
  // The failure, and this rank's call at that time. `op`: that saw the failure; empty:
  // unknown.
  absl::Status Located(const absl::Status& broken, std::string_view operation,
                       std::span<const int64_t> log, int64_t step) const;
  // The first difference between ranks, from the logs of all that make calls together, or from the
  // trails in the records of a verdict; OK: there is none.
  absl::Status DifferenceOfLogs(std::span<const std::vector<int64_t>> logs) const;
  absl::Status DifferenceOfTrails(std::span<const ExchangeRecord> records) const;

  const std::string& engine() const { return engine_; }
  int rank() const { return me_.rank; }
  std::string RankName(int rank) const { return me_.RankName(rank); }

 private:
  std::string NonFinite(const Verdict& ranks) const;
  // `ranks`: rank 0 is the first.
  absl::Status BegunDifferently(const WorldRank& ranks, std::span<const int64_t> first,
                                std::span<const int64_t> other, size_t other_rank) const;
  absl::Status OpenedDifferently(const WorldRank& ranks, int number, int first, int other,
                                 size_t other_rank) const;

  const std::string engine_;
  const WorldRank me_, caller_;
  const ModelSpec& model_;
};

}  // namespace ebb
