#include "ebb/runtime/engine/outcome/outcome_messages.h"

#include <bit>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/comm/call_kind.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/engine/outcome/scope_trail.h"

namespace ebb {
namespace {

// A call outside of steps, or kNone.
CallKind CallOf(std::span<const int64_t> log) {
  const bool is_call = log.size() > 1 && log[1] >= kOfCall;
  return is_call ? static_cast<CallKind>(log[1] - kOfCall) : CallKind::kNone;
}

bool IsEvaluation(std::span<const int64_t> log) {
  return log.size() > 1 && log[1] < 0;
}

// The second entry of a log, in words.
std::string_view DescribeBegun(std::span<const int64_t> log) {
  constexpr std::string_view kCalls[] = {"calls Suspend",
                                         "calls Resume",
                                         "calls CopyParametersFrom",
                                         "copies its parameters into another engine",
                                         "calls SetTrainingState",
                                         "calls Agree",
                                         "calls ReadAsync",
                                         "calls Reorder"};
  constexpr auto kFirst = static_cast<size_t>(CallKind::kSuspend);
  static_assert(kFirst + std::size(kCalls) == static_cast<size_t>(CallKind::kReorder) + 1);
  if (const CallKind call = CallOf(log); Meets(call))
    return kCalls[static_cast<size_t>(call) - kFirst];
  return IsEvaluation(log) ? "is in an evaluation" : "is in a step";
}

}  // namespace

std::string OutcomeMessages::ScopeName(sharding::ScopeKind kind, int unit) const {
  constexpr const char* kCalls[] = {"Forward", "Backward", "Recompute"};
  return absl::StrCat(kCalls[static_cast<size_t>(kind)], "('",
                      model_.units[static_cast<size_t>(unit)].name, "')");
}

std::string OutcomeMessages::ScopeName(int64_t code) const {
  return ScopeName(sharding::KindOfCode(code), sharding::UnitOfCode(code));
}

std::string OutcomeMessages::NonFinite(const Verdict& ranks) const {
  const int parameter = ranks.non_finite_parameter;
  return absl::StrCat(
      RankName(ranks.non_finite_rank), " has a non-finite gradient in unit '",
      model_.units[static_cast<size_t>(ranks.non_finite_unit)].name, "'",
      parameter < 0 ? ""
                    : absl::StrCat(", parameter '",
                                   model_.parameters[static_cast<size_t>(parameter)].name, "'"));
}

std::string OutcomeMessages::Skipped(const Verdict& ranks, const StepReport& report,
                                     float next_loss_scale) const {
  return absl::StrCat(engine_, ": step ", report.step, " skipped: ", NonFinite(ranks), "; ",
                      report.skipped_steps, " skipped so far, loss scale now ", next_loss_scale);
}

absl::Status OutcomeMessages::Overflowed(const Verdict& ranks) const {
  return absl::OutOfRangeError(
      absl::StrCat(NonFinite(ranks),
                   ", and overflow checks are off (ebb.check_overflow): nothing may be updated "
                   "with it; lower the learning rate, or turn the checks on to skip such steps"));
}

absl::Status OutcomeMessages::ReplicasDiffer(const ReplicaDifference& replicas) const {
  return absl::FailedPreconditionError(absl::StrCat(
      "the gradient of '", model_.units[replicas.unit].name,
      "' differs between tensor ranks 0 and ", replicas.other_tensor,
      ": the sum of its squares is ", absl::StrFormat("%.17g", replicas.first_squares), " on ",
      RankName(replicas.first), " and ", absl::StrFormat("%.17g", replicas.other_squares), " on ",
      RankName(replicas.other),
      ". Tensor ranks have the same values of it: compute its gradient alike, bit for bit, with "
      "the same samples and random numbers (dropout). Set sums_gradient only if each has a term of "
      "it (in Python its gradient is a DTensor with Partial); over NCCL set "
      "ebb.deterministic_reduce, too"));
}

absl::Status OutcomeMessages::LossesDiffer(const LossDifference& losses) const {
  return absl::FailedPreconditionError(absl::StrCat(
      "the losses of tensor ranks 0 and ", losses.other_tensor,
      " differ: ", absl::StrFormat("%.9g", losses.first_loss), " on ", RankName(losses.first), ", ",
      absl::StrFormat("%.9g", losses.other_loss), " on ", RankName(losses.other),
      ". Give the tensor ranks of one data rank the same samples: choose them by data_rank() of "
      "data_ranks(), not by the rank, and with the same seed, as of dropout"));
}

absl::Status OutcomeMessages::OtherScopes(const Verdict& ranks) const {
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks opened different scopes, or began a step or evaluation with different options: ",
      RankName(ranks.other_scopes), " differs from ", RankName(0),
      "; every rank must open the same scopes in the same order"));
}

absl::Status OutcomeMessages::OtherRates(const Verdict& ranks) const {
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks gave a step different learning rates or weight decays of groups, or different "
      "gradient_scale: ",
      RankName(ranks.other_rates), " differs from ", RankName(0),
      "; give the step the same values on every rank"));
}

absl::Status OutcomeMessages::Located(const absl::Status& broken, std::string_view operation,
                                      std::span<const int64_t> log, int64_t step) const {
  std::string where = absl::StrCat("in step ", step);
  if (Meets(CallOf(log))) {
    where = absl::StrCat("with the engine '", engine_, "' ", RankName(rank()), " ",
                         NameView(DescribeBegun(log)));
  } else if (IsEvaluation(log)) {
    where = "in an evaluation";
  }
  if (!operation.empty())
    absl::StrAppend(&where, ", at the ", absl::string_view(operation.data(), operation.size()));
  if (log.size() > kBegunEntries)
    absl::StrAppend(&where, ", after ", ScopeName(log.back()), " was opened");
  return absl::Status(broken.code(), absl::StrCat(where, ": ", broken.message()));
}

absl::Status OutcomeMessages::DifferenceOfLogs(std::span<const std::vector<int64_t>> logs) const {
  const std::vector<int64_t>& first = logs.front();
  const auto code = [](const std::vector<int64_t>& of, size_t index) {
    return index < of.size() ? static_cast<int>(of[index]) : ScopeTrail::kNothing;
  };
  for (size_t r = 1; r < logs.size(); ++r) {
    const std::vector<int64_t>& other = logs[r];
    if (first == other) continue;
    if (absl::Status begun = BegunDifferently(caller_, first, other, r); !begun.ok()) return begun;
    size_t index = kBegunEntries;
    while (index < first.size() && index < other.size() && first[index] == other[index]) ++index;
    return OpenedDifferently(caller_, static_cast<int>(index - kBegunEntries), code(first, index),
                             code(other, index), r);
  }
  return absl::OkStatus();
}

absl::Status OutcomeMessages::DifferenceOfTrails(std::span<const ExchangeRecord> records) const {
  const ScopeTrail first = records.front().Trail();
  for (size_t r = 1; r < records.size(); ++r) {
    const ScopeTrail other = records[r].Trail();
    if (absl::Status begun = BegunDifferently(me_, first.begun, other.begun, r); !begun.ok())
      return begun;
    if (const std::optional<ScopeDifference> difference = FirstDifference(first, other))
      return OpenedDifferently(me_, difference->number, difference->first, difference->other, r);
  }
  return absl::OkStatus();
}

// Reads logs, or the part of them that trails have.
absl::Status OutcomeMessages::BegunDifferently(const WorldRank& ranks,
                                               std::span<const int64_t> first,
                                               std::span<const int64_t> other,
                                               size_t other_rank) const {
  const std::string zero = ranks.RankName(0), rank = ranks.RankName(static_cast<int>(other_rank)),
                    with_engine = absl::StrCat(" with the engine '", engine_, "': ");
  size_t index = 0;
  while (index < kBegunEntries && index < first.size() && index < other.size() &&
         first[index] == other[index])
    ++index;
  if (index == kBegunEntries || index == first.size() || index == other.size())
    return absl::OkStatus();
  const CallKind call = CallOf(first);
  if (first[1] != other[1] && (Meets(call) || Meets(CallOf(other)))) {
    return DoDifferentThings(absl::StrCat(with_engine, zero, " ", NameView(DescribeBegun(first)),
                                          ", ", rank, " ", NameView(DescribeBegun(other))));
  }
  if (index > 0 && Meets(call)) {
    const std::string of_engine = absl::StrCat(" the engine '", engine_, "'");
    std::string what = absl::StrCat("copy parameters into", of_engine, " from different engines");
    if (call == CallKind::kSetTrainingState)
      what = absl::StrCat("set different training states of", of_engine);
    if (call == CallKind::kAgree)
      what = absl::StrCat("call Agree of", of_engine, " about different things");
    return absl::FailedPreconditionError(absl::StrCat("ranks ", what, ": ", rank, " differs from ",
                                                      zero, "; every rank must give the same"));
  }
  if (index == 1 && IsEvaluation(first) != IsEvaluation(other)) {
    const auto begun = [](bool evaluation) {
      return evaluation ? " began an evaluation" : " began a step";
    };
    return DoDifferentThings(absl::StrCat(with_engine, rank, begun(IsEvaluation(other)), " where ",
                                          zero, begun(IsEvaluation(first))));
  }
  constexpr const char* kWhat[kBegunEntries] = {
      "are in different steps or evaluations, or calls (steps and evaluations are counted "
      "together, "
      "and so are other calls)",
      "began a step or evaluation with different micro_batches",
      "began a step with different gradient_divisor", "began a step with different learning_rate",
      "began a step with different hold_updates (1), may_leave_out (2) or rates_at_finish (4)"};
  const bool is_double = index == 2 || index == 3;
  const auto value = [&](int64_t code) {
    // An evaluation's are negative in a log.
    return is_double ? absl::StrCat(std::bit_cast<double>(code)) : absl::StrCat(std::abs(code));
  };
  return absl::FailedPreconditionError(absl::StrCat("ranks ", kWhat[index], ": ",
                                                    value(first[index]), " on ", zero, ", ",
                                                    value(other[index]), " on ", rank));
}

absl::Status OutcomeMessages::OpenedDifferently(const WorldRank& ranks, int number, int first,
                                                int other, size_t other_rank) const {
  const auto name = [this](int code) {
    return code == ScopeTrail::kNothing ? std::string("nothing more") : ScopeName(code);
  };
  return OpenedDifferentScopes(number + 1, ranks.RankName(0), name(first),
                               ranks.RankName(static_cast<int>(other_rank)), name(other));
}

}  // namespace ebb
