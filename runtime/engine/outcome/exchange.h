// The ranks' messages of a step: the parts of the norm and the loss, whether anything went wrong,
// and which scopes they opened. One small all-gather, between two tasks of record_exchange.h, so
// every rank reaches the same verdict.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/engine/outcome/scope_trail.h"
#include "ebb/runtime/engine/step.h"
#include "ebb/sharding/mesh.h"
#include "ebb/sharding/plan.h"

namespace ebb {

struct ExchangeRecord {
  double squares = 0;  // of this rank's slices that count here, scaled as the gradients are
  double loss = 0;     // sum of the losses that were added
  uint64_t scopes_hash = 0;
  uint64_t rates_hash = 0;  // of the step's given StepRates and gradient scale
  // A unit with a non-finite gradient here. If several have one, it is the first that finished its
  // backward, because such gradients spread towards the input.
  int32_t non_finite_unit = -1;
  int32_t non_finite_parameter = -1;  // one of that unit; -1: not known
  int32_t status_code = 0;
  int32_t message_bytes = 0;
  int64_t exchange = 0;    // number of the exchange, from 1; an older record is not the awaited one
  int64_t known = 0;       // this rank's caller knows the errors of exchanges up to this one
  bool adds_loss = false;  // some loss was added
  bool loss_counts = false;      // tensor ranks add the same, and one of them counts it
  bool failed = false;           // this rank has an error; `message` says which
  bool engine_failed = false;    // the error is the engine's, for good
  bool updates_started = false;  // early updates of this step
  bool returned = false;         // its Finish returns this error
  bool broken = false;           // a communicator of its steps is broken, or its device
  // The error's text; without one the trail of the step's scopes, or the evaluation's sums.
  char message[440] = {};

  // Keeps the beginning and the end of a long message.
  void SetError(const absl::Status& status);
  absl::Status Error(std::string_view rank_name) const;
  void SetTrail(const ScopeTrail& trail);
  ScopeTrail Trail() const;
  void SetSums(const Evaluation::Sums& sums);
  Evaluation::Sums Sums() const;
};
static_assert(sizeof(ExchangeRecord) == sharding::kExchangeBytes);

// Conclusions of all ranks from all records, in rank order.
struct Verdict {
  double squares = 0, loss = 0;
  int non_finite_rank = -1, non_finite_unit = -1, non_finite_parameter = -1;
  int other_scopes = -1;  // the first rank that opened other scopes than rank 0
  int other_rates = -1;   // likewise with other rates
  int64_t known = 0;      // on every rank
  bool returned = false;  // on every rank
  bool engine_failed = false, updates_started = false, broken = false;  // on any rank
  absl::Status error;  // of the first rank that has one
};
// `backwards`: by unit, a number that grows with the time of its last backward; empty: the units'
// own order. `error_name`: the name of a rank for its error.
Verdict Conclude(std::span<const ExchangeRecord> records,
                 absl::FunctionRef<std::string(int rank)> error_name,
                 std::span<const int> backwards = {});

// The ranks of a verdict in their mesh: which of them count a value, and which have replicas of a
// unit. With tensor ranks the verdict is of more ranks than the engine's world:
//
//   verdict          0   1   2   3      EngineOptions::verdict, or the world of a mesh
//   engine's world   0       1          data ranks: this rank's part of the model
//                        0       1      the other part
struct VerdictRanks {
  Mesh mesh = {};
  std::vector<int> ranks = {};     // by number in the mesh: the verdict's rank
  int own = 0;                     // this rank's number in the mesh
  std::vector<int> compared = {};  // units with replicas over tensor (Decisions::compared)

  // Whether this rank adds what all ranks along these axes have.
  bool Counts(Axes whole) const { return ebb::Counts(whole, mesh, own); }
};

// Two ranks of the verdict with the same slice of a unit that is whole over tensor, and the squares
// of its gradient there, which differ.
struct ReplicaDifference {
  int unit = 0;
  int first = 0, other = 0;  // ranks of the verdict
  int other_tensor = 0;      // of the second; the first is tensor rank 0
  double first_squares = 0, other_squares = 0;
};
// The unit that finished its backward first, of those that differ. `squares`: of ranks.compared, by
// rank of the verdict.
std::optional<ReplicaDifference> DifferenceOfReplicas(std::span<const double> squares,
                                                      const VerdictRanks& ranks,
                                                      std::span<const int> backwards);
// Two ranks of the verdict with the same samples, and the losses that they added, which differ.
struct LossDifference {
  int first = 0, other = 0;  // ranks of the verdict
  int other_tensor = 0;      // of the second; the first is tensor rank 0
  double first_loss = 0, other_loss = 0;
};
std::optional<LossDifference> DifferenceOfLosses(std::span<const ExchangeRecord> records,
                                                 const VerdictRanks& ranks);
// Whether the unit finished its backward before the other.
bool IsEarlier(int unit, int other, std::span<const int> backwards);
// The sums of an evaluation without an error on any rank.
Evaluation::Sums SumsOf(std::span<const ExchangeRecord> records);

}  // namespace ebb
