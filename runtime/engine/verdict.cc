// What all ranks conclude at the end of a step: the norm, whether anything overflowed, and whether
// anyone has an error.
#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

void Executor::EnqueueExchange() {
  verdict_ = {};
  const int parity = progress_.parity;
  const size_t own = sizeof(ExchangeRecord), all = own * static_cast<size_t>(size_);
  ExchangeRecord& record = control_block_->own_record();
  record = {.loss_count = progress_.loss_count,
            .scopes_hash = progress_.hash,
            .exchange = ++exchanges_,
            .updates_started = progress_.updates_started};
  if (absl::Status error = StuckError(); !error.ok()) record.SetError(error);
  if (!progress_.evaluation) Compute(*reduce_, [this] { RefreshNorms(); });
  compute_.Record(*fence_);  // behind the last loss
  reduce_->Wait(*fence_);
  reduce_->Enqueue(
      [this, parity, evaluation = progress_.evaluation] { CompleteRecord(parity, evaluation); });
  std::byte* const records = storage_->ExchangeRecords();
  reduce_->Copy(records + all, &record, static_cast<int64_t>(own));
  exchange_span_ = {.send = records + all, .receive = records, .count = sharding::kExchangeBytes};
  Communicator& communicator = ExchangeCommunicator();
  Compute(*reduce_, [this] { exchange_moved_before_ = Moved(ExchangeCommunicator()); });
  StickCollective(communicator,
                  communicator.AllGather(*reduce_, {&exchange_span_, 1}, DType::kInt8));
  Compute(*reduce_, [this, parity, counts = !progress_.evaluation] {
    if (!counts) return;
    moved_bytes_[parity][static_cast<int>(sharding::OperationKind::kExchange)] +=
        Moved(ExchangeCommunicator()) - exchange_moved_before_;
  });
  reduce_->Copy(control_block_->records().data(), records, static_cast<int64_t>(all));
  reduce_->Enqueue([this, parity] { ConcludeExchange(parity); });
}

// Of shards that have changed since they were summed.
void Executor::RefreshNorms() {
  for (size_t u = 0; u < squares_stale_.size(); ++u) {
    if (!std::exchange(squares_stale_[u], uint8_t{0}) || !plan().decisions.trainable[u]) continue;
    const int unit = static_cast<int>(u);
    Stream& stream = SettledStream(unit);
    const absl::Status read =
        VisitGradient(unit, Access::kRead, [&](std::byte* shard) { Norm(stream, unit, shard); });
    if (!read.ok()) Fail(read);
  }
}

// Where the gradient of a unit is summed off the plan, as if by a task of the reduce stream. On a GPU
// that does not reach what lives in host memory: the calling thread does, once it is at rest.
Stream& Executor::SettledStream(int unit) {
  if (GradientOnDevice(unit) || reduce_->view().native == nullptr) return *reduce_;
  reduce_->WaitIdle();
  for (std::optional<Stream>* stream : {&download_, &host_sum_, &host_update_, &written_})
    (*stream)->WaitIdle();
  return *host_sum_;
}

// What only the stream knows: norms, and what failed on it.
void Executor::CompleteRecord(int parity, bool evaluation) {
  ExchangeRecord& record = control_block_->own_record();
  record.loss = control_block_->loss(parity);
  for (size_t u = 0; u < model_.units.size() && !evaluation; ++u) {
    if (!plan().decisions.trainable[u]) continue;
    const double square = control_block_->square(static_cast<int>(u));
    if (!std::isfinite(square) && record.non_finite_unit < 0)
      record.non_finite_unit = static_cast<int32_t>(u);
    if (replica_ == 0) record.squares += square;  // the others have the same
  }
  if (HasFailed()) {
    record.engine_failed = true;
    record.SetError(StuckError());
  } else if (absl::Status broken = CommunicationError(); record.failed == 0 && !broken.ok()) {
    record.SetError(broken);
  }
}

void Executor::ConcludeExchange(int parity) {
  const bool early = progress_.run->plan.decisions.timing == sharding::UpdateTiming::kEarly;
  // A rank that told the others of its failure may have left since: what it told counts.
  const std::span<const ExchangeRecord> records = control_block_->records();
  const bool complete =
      std::all_of(records.begin(), records.end(),
                  [this](const ExchangeRecord& record) { return record.exchange == exchanges_; });
  if (absl::Status broken = ExchangeCommunicator().status(); broken.ok() || complete) {
    verdict_ = Conclude(records);
  } else {
    verdict_.error = broken;
  }
  if (progress_.evaluation) return;
  const bool agreed = verdict_.error.ok() && !verdict_.scopes_differ;
  const bool finite = std::isfinite(verdict_.squares);
  if (!agreed || !finite) blocked_[parity] = true;
  if (early) return;
  SetScalars(parity, agreed && finite
                         ? ScalarsFor(std::sqrt(verdict_.squares) / control_block_->loss_scale())
                         : StepScalars());
}

// What went wrong on any rank, after the exchange; the same step fails on all of them.
absl::Status Executor::AgreedError() {
  absl::Status status = StuckError();
  if (HasFailed()) {
    // The step's first updates may already have failed, after all ranks had agreed on it.
    if (!verdict_.engine_failed) AbortStep(status);
    return Withdraw();
  }
  if (verdict_.engine_failed) {
    Fail(status.ok() ? verdict_.error : status);
    return StuckError();
  }
  if (absl::Status broken = CommunicationError(); !broken.ok()) {
    // A rank may be waiting in the other one for this rank.
    AbortStep(broken);
    const absl::Status difference = MayHaveGoneApart(broken) ? FindDifference() : absl::OkStatus();
    if (status.ok()) status = difference.ok() ? Located(broken) : difference;
    Fail(absl::Status(status.code(), absl::StrCat("the engine has failed: ", status.message())));
    return StuckError();
  }
  if (status.ok()) status = verdict_.error;
  if (status.ok() && verdict_.scopes_differ) {
    status = FindDifference();
    if (status.ok()) status = absl::FailedPreconditionError("ranks opened different scopes");
  }
  return status;
}

absl::Status Executor::ReachVerdict() {
  const sharding::Decisions& decisions = progress_.run->plan.decisions;
  EBB_RETURN_IF_ERROR(AgreedError());
  const bool finite = std::isfinite(verdict_.squares);
  const std::string where = finite ? ""
                                   : absl::StrCat("a non-finite gradient in unit '",
                                                  model_.units[verdict_.non_finite_unit].name,
                                                  "' of rank ", verdict_.non_finite_rank);
  if (!finite && !config_.checks_overflow()) {
    return absl::OutOfRangeError(
        absl::StrCat(where,
                     ", and overflow checks are off (ebb.check_overflow): nothing may be updated "
                     "with it; lower the learning rate, or turn the checks on to skip such steps"));
  }
  const StepScalars& scalars = scalars_[progress_.parity];
  StepReport report;
  report.step = ++finished_steps_;
  report.applied = finite;
  report.skipped_steps = skipped_steps_ += finite ? 0 : 1;
  report.loss = verdict_.loss / progress_.divisor;
  report.gradient_norm = std::sqrt(verdict_.squares) / control_block_->loss_scale();
  report.loss_scale = control_block_->loss_scale();
  report.learning_rate = finite ? scalars.rates.learning_rate : ScalarsFor(0).rates.learning_rate;
  if (finite) ++applied_steps_;
  scaler_.Update(!finite);
  report_ = report;
  if (!finite && rank_ == 0) {
    const std::string message =
        absl::StrCat(options_.name, ": step ", report.step, " skipped: ", where, "; ",
                     report.skipped_steps, " skipped so far, loss scale now ", scaler_.scale());
    // fp16 finds its scale by overflowing now and then; anything else deserves attention.
    decisions.compute == DType::kFloat16 && !scaler_.at_minimum() ? LogInfo(message)
                                                                  : LogWarning(message);
  }
  return absl::OkStatus();
}

// Names the first thing that ranks did differently in this step. OK if there is none, or if they
// can no longer tell each other.
absl::Status Executor::FindDifference() {
  const absl::StatusOr<std::vector<std::vector<int64_t>>> logs = AllLists(Control(), progress_.log);
  if (!logs.ok()) return absl::OkStatus();
  // No rank goes on, and perhaps withdraws, before all have the logs.
  StickCollective(*control_, control_->Barrier(*reduce_));
  reduce_->WaitIdle();
  const auto name = [&](const std::vector<int64_t>& log, size_t index) {
    return index < log.size() ? ScopeName(log[index] % 2 == 1, static_cast<int>(log[index] / 2))
                              : std::string("nothing more");
  };
  for (size_t r = 1; r < logs->size(); ++r) {
    const std::vector<int64_t>&first = logs->front(), &other = (*logs)[r];
    if (first == other) continue;
    size_t index = 0;
    while (index < first.size() && index < other.size() && first[index] == other[index]) ++index;
    if (index < kBegunEntries) {
      constexpr int64_t kMeetings = static_cast<int64_t>(Meeting::kSuspend);
      if (first[1] != other[1] && std::max(first[1], other[1]) >= kMeetings) {
        return absl::FailedPreconditionError(
            absl::StrCat("ranks do different things with the engine '", options_.name, "': rank 0 ",
                         Describe(first[1]), ", rank ", r, " ", Describe(other[1])));
      }
      if (index > 0 && first[1] >= kMeetings) {
        return absl::FailedPreconditionError(
            absl::StrCat("ranks copy parameters into the engine '", options_.name,
                         "' from different engines: rank ", r, " from another one than rank 0"));
      }
      constexpr const char* kWhat[kBegunEntries] = {
          "are in different steps or evaluations (counted from the first, with every Suspend, "
          "Resume "
          "and CopyParametersFrom)",
          "began one with different micro_batches (negative: an evaluation)",
          "began a step with different gradient_divisor",
          "began a step with different learning_rate", "began a step with different hold_updates"};
      const bool is_double = index == 2 || index == 3;
      const auto value = [&](int64_t code) {
        return is_double ? absl::StrCat(std::bit_cast<double>(code)) : absl::StrCat(code);
      };
      return absl::FailedPreconditionError(absl::StrCat("ranks ", kWhat[index], ": ",
                                                        value(first[index]), " on rank 0, ",
                                                        value(other[index]), " on rank ", r));
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "ranks opened different scopes: as number ", index - kBegunEntries + 1,
        " of the step rank 0 opened ", name(first, index), ", rank ", r, " ", name(other, index),
        "; every rank must open the same scopes in the same order"));
  }
  return absl::OkStatus();
}

// Gradients written between Reduce and Finish: norms anew, and at stage 0 whole again.
void Executor::RefreshWrittenGradients() {
  std::fill(squares_stale_.begin(), squares_stale_.end(), uint8_t{1});
  Runnable& run = *progress_.run;
  for (size_t index = 0; index < run.plan.operations.size(); ++index) {
    if (run.plan.operations[index].kind != sharding::OperationKind::kGatherGradient) continue;
    run.issued[index] = 0;
    Issue(static_cast<int>(index));
  }
}

}  // namespace ebb
