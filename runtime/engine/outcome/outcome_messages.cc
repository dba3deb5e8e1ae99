#include "ebb/runtime/engine/outcome/outcome_messages.h"

#include <bit>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/outcome/scope_trail.h"

namespace ebb {
namespace {

bool IsCollectiveCall(std::span<const int64_t> log) {
  return log.size() > 1 && log[1] >= static_cast<int64_t>(CollectiveCall::kSuspend);
}

bool IsEvaluation(std::span<const int64_t> log) {
  return log.size() > 1 && log[1] < 0;
}

// The second entry of a log, in words.
std::string DescribeBegun(int64_t begun) {
  switch (static_cast<CollectiveCall>(begun)) {
    case CollectiveCall::kSuspend:
      return "calls Suspend";
    case CollectiveCall::kResume:
      return "calls Resume";
    case CollectiveCall::kCopyInto:
      return "calls CopyParametersFrom";
    case CollectiveCall::kCopyFrom:
      return "copies its parameters into another engine";
    case CollectiveCall::kSetTrainingState:
      return "calls SetTrainingState";
    case CollectiveCall::kAgree:
      return "calls Agree";
    case CollectiveCall::kReadAsync:
      return "calls ReadAsync";
    case CollectiveCall::kReorder:
      return "calls Reorder";
  }
  return begun < 0 ? "is in an evaluation" : "is in a step";
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
  if (IsCollectiveCall(log)) {
    where = absl::StrCat("with the engine '", engine_, "' ", RankName(rank()), " ",
                         DescribeBegun(log[1]));
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
    if (absl::Status begun = BegunDifferently(first, other, r); !begun.ok()) return begun;
    size_t index = kBegunEntries;
    while (index < first.size() && index < other.size() && first[index] == other[index]) ++index;
    return OpenedDifferently(static_cast<int>(index - kBegunEntries), code(first, index),
                             code(other, index), r);
  }
  return absl::OkStatus();
}

absl::Status OutcomeMessages::DifferenceOfTrails(std::span<const ExchangeRecord> records) const {
  const ScopeTrail first = records.front().Trail();
  for (size_t r = 1; r < records.size(); ++r) {
    const ScopeTrail other = records[r].Trail();
    if (absl::Status begun = BegunDifferently(first.begun, other.begun, r); !begun.ok())
      return begun;
    if (const std::optional<ScopeDifference> difference = FirstDifference(first, other))
      return OpenedDifferently(difference->number, difference->first, difference->other, r);
  }
  return absl::OkStatus();
}

// Reads logs, or the part of them that trails have.
absl::Status OutcomeMessages::BegunDifferently(std::span<const int64_t> first,
                                               std::span<const int64_t> other,
                                               size_t other_rank) const {
  const std::string zero = RankName(0), rank = RankName(static_cast<int>(other_rank));
  size_t index = 0;
  while (index < kBegunEntries && index < first.size() && index < other.size() &&
         first[index] == other[index])
    ++index;
  if (index == kBegunEntries || index == first.size() || index == other.size())
    return absl::OkStatus();
  if (first[1] != other[1] && (IsCollectiveCall(first) || IsCollectiveCall(other))) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks do different things with the engine '", engine_, "': ", zero, " ",
                     DescribeBegun(first[1]), ", ", rank, " ", DescribeBegun(other[1])));
  }
  if (index > 0 && first[1] == static_cast<int64_t>(CollectiveCall::kSetTrainingState)) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks set different training states of the engine '", engine_, "': ", rank,
                     " differs from ", zero, "; every rank must set the same"));
  }
  if (index > 0 && first[1] == static_cast<int64_t>(CollectiveCall::kAgree)) {
    return absl::FailedPreconditionError(absl::StrCat("ranks call Agree of the engine '", engine_,
                                                      "' about different things: ", rank,
                                                      " differs from ", zero));
  }
  if (index > 0 && IsCollectiveCall(first)) {
    return absl::FailedPreconditionError(absl::StrCat("ranks copy parameters into the engine '",
                                                      engine_, "' from different engines: ", rank,
                                                      " differs from ", zero));
  }
  if (index == 1 && IsEvaluation(first) != IsEvaluation(other)) {
    const auto begun = [](bool evaluation) {
      return evaluation ? " began an evaluation" : " began a step";
    };
    return absl::FailedPreconditionError(
        absl::StrCat("ranks do different things with the engine '", engine_, "': ", rank,
                     begun(IsEvaluation(other)), " where ", zero, begun(IsEvaluation(first))));
  }
  constexpr const char* kWhat[kBegunEntries] = {
      "are in different steps or evaluations (counted from the first, with every Suspend, Resume, "
      "SetTrainingState and CopyParametersFrom)",
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

absl::Status OutcomeMessages::OpenedDifferently(int number, int first, int other,
                                                size_t other_rank) const {
  const auto name = [this](int code) {
    return code == ScopeTrail::kNothing ? std::string("nothing more") : ScopeName(code);
  };
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks opened different scopes: as number ", number + 1, " of the step ", RankName(0),
      " opened ", name(first), ", ", RankName(static_cast<int>(other_rank)), " ", name(other),
      "; every rank must open the same scopes in the same order"));
}

}  // namespace ebb
