// Parameters of one engine into another, from shards to shards: each round packs what goes to
// other ranks into staging, sends and receives it as one message for each pair of ranks, and unpacks
// it; what stays on a rank is cast from the one shard straight into the other.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/copy_plan.h"
#include "ebb/sharding/fingerprint.h"

namespace ebb {

using sharding::Transfer;

// On the host, for as long as the copy lasts; counted in the destination's ledger.
struct Executor::CopyStaging {
  static constexpr int64_t kBytesMax = int64_t{4} << 20;  // of each direction

  absl::Status Allocate(const sharding::CopyPlan& plan, MemoryLedger& ledger) {
    const Device host = Device::Cpu(1);
    for (Buffer* buffer : {&send, &receive}) {
      EBB_ASSIGN_OR_RETURN(*buffer,
                           host.Allocate(plan.staging_bytes, "the staging of CopyParametersFrom"));
    }
    charge = MemoryLedger::Charge(ledger, StateClass::kStaging, Tier::kCpu, 2 * plan.staging_bytes);
    return absl::OkStatus();
  }

  Buffer send, receive;
  MemoryLedger::Charge charge;
  std::vector<CollectiveSpan> messages;  // of one round; borrowed until they have been sent
};

// What a device receives lies behind what it sends.
absl::Status Executor::MakeCopyMirror() {
  return copy_mirror_.Allocate(device_, 2 * CopyStaging::kBytesMax, ledger_);
}

absl::Status Executor::CheckCopy(Executor& source) const {
  if (!(source.given_world_ == given_world_)) {
    return absl::FailedPreconditionError(
        absl::StrCat("CopyParametersFrom('", source.options_.name, "') into '", options_.name,
                     "': the engines are of different worlds; create both with the same World"));
  }
  if (source.progress_.alive) {
    return absl::FailedPreconditionError(absl::StrCat(
        "CopyParametersFrom('", source.options_.name,
        "') while a Step or Evaluation of that engine is alive: finish or drop it first"));
  }
  return source.errors_.Tell();
}

absl::Status Executor::CopyParametersFrom(Executor& source) {
  if (&source == this) {
    return absl::InvalidArgumentError(
        absl::StrCat("CopyParametersFrom of '", options_.name, "' from itself"));
  }
  if (progress_.alive) {
    return absl::FailedPreconditionError(
        absl::StrCat("CopyParametersFrom into '", options_.name,
                     "' while a Step or Evaluation of it is alive: finish or drop it first"));
  }
  calls_.Note(CallKind::kCopy);
  const auto side = [](const Executor& engine) {
    const bool own_masters = engine.plan().decisions.stochastic_rounding;
    return sharding::CopySide{.model = &engine.model_,
                              .layout = &engine.plan().layout,
                              .compute = engine.config_.compute,
                              .master = own_masters ? engine.config_.compute : DType::kFloat32};
  };
  const absl::StatusOr<sharding::CopyPlan> copy =
      sharding::PlanCopy(side(source), side(*this), size_, CopyStaging::kBytesMax);
  CopyStaging staging;
  absl::Status own = Settle();
  if (absl::Status settled = source.Settle(); own.ok()) own = std::move(settled);
  if (own.ok()) own = CheckCopy(source);
  if (own.ok()) own = copy.status();
  if (own.ok()) own = staging.Allocate(*copy, ledger_);
  if (own.ok()) own = MakeCopyMirror();
  const uint64_t from =
      sharding::Hasher().Add(source.options_.name).Add(sharding::Fingerprint(source.model_)).hash();
  EBB_RETURN_IF_ERROR(Meet(Meeting::kCopyInto, static_cast<int64_t>(from), own));
  EBB_RETURN_IF_ERROR(source.Meet(Meeting::kCopyFrom, /*subject=*/0, absl::OkStatus()));

  AwaitState();
  source.AwaitState();
  absl::Status copied = RunCopy(source, *copy, staging);
  if (copied.ok()) copied = source.errors_.Tell();
  masters_written_ = true;
  if (copied.ok() && !suspended_) copied = SpreadWritten();
  copied = AgreeOnStatus(Control(), copied);
  if (!copied.ok()) {
    errors_.Fail(absl::Status(
        copied.code(), absl::StrCat("the engine '", options_.name,
                                    "' has failed: CopyParametersFrom ended in the middle; reload "
                                    "the model. ",
                                    copied.message())));
  }
  return errors_.Tell();
}

absl::Status Executor::RunCopy(Executor& source, const sharding::CopyPlan& copy,
                               CopyStaging& staging) {
  StateArray verified{.what = StateClass::kMaster, .unit = -1, .trainable = true};
  for (const std::vector<Transfer>& round : copy.rounds) {
    EBB_RETURN_IF_ERROR(ExchangePieces(source, round, verified, staging));
  }
  return control_->status();
}

// `verified`: of the source, what was last found to be what was written.
absl::Status Executor::ExchangePieces(Executor& source, std::span<const Transfer> transfers,
                                      StateArray& verified, CopyStaging& staging) {
  ThreadTeam& team = compute_.team();
  // The runs of `count` elements of a parameter's masters on this rank, once updates have written
  // them: visit(data, dtype, which of the elements is the first, how many).
  const auto visit = [](Executor& engine, ParameterId p, int64_t begin, int64_t count,
                        Access access, StateVisitor visit_run) -> absl::Status {
    const StateSlice found = engine.FindSlice(p, StateClass::kMaster, "").value();
    const int64_t at = found.offset + begin - found.begin;
    return engine.VisitState(found.array, at, at + count, access,
                             [&](std::byte* data, DType dtype, int64_t first, int64_t length) {
                               return visit_run(data, dtype, first - at, length);
                             });
  };
  // The others are waiting for this rank's messages.
  const auto failed = [&](const absl::Status& status) {
    control_->Abort(status);
    return status;
  };
  // Packs what is to be sent, and casts what stays.
  int64_t packed = 0;
  for (const Transfer& transfer : transfers) {
    if (transfer.from != rank_) continue;
    const StateArray array = source.FindSlice(transfer.source, StateClass::kMaster, "")->array;
    if (array.unit != verified.unit || array.trainable != verified.trainable) {
      if (const absl::Status agrees = source.VerifyArray(array); !agrees.ok())
        return failed(agrees);
      verified = array;
    }
    const int64_t count = transfer.end - transfer.begin;
    std::byte* const sent = staging.send.data() + packed;
    const absl::Status read = visit(
        source, transfer.source, transfer.begin, count, Access::kRead,
        [&](std::byte* from, DType from_dtype, int64_t first, int64_t length) -> absl::Status {
          if (transfer.to != rank_) {
            optim::Cast(team, from, from_dtype, sent + first * SizeOf(transfer.dtype),
                        transfer.dtype, length, optim::Rounding::kParameter);
            return absl::OkStatus();
          }
          return visit(*this, transfer.destination, transfer.begin + first, length, Access::kWrite,
                       [&](std::byte* to, DType to_dtype, int64_t begin, int64_t part) {
                         optim::Cast(team, from + begin * SizeOf(from_dtype), from_dtype, to,
                                     to_dtype, part, optim::Rounding::kParameter);
                         return absl::OkStatus();
                       });
        });
    if (!read.ok()) return failed(read);
    if (transfer.to != rank_) packed += transfer.staged_bytes();
  }
  // One message for each pair of ranks.
  staging.messages.clear();
  staging.messages.reserve(transfers.size());
  int64_t sent = 0, received = 0;
  copy_mirror_.Upload(*reduce_, staging.send.data(), 0, packed);
  for (size_t i = 0; i < transfers.size();) {
    const int from = transfers[i].from, to = transfers[i].to;
    int64_t bytes = 0;
    for (; i < transfers.size() && transfers[i].from == from && transfers[i].to == to; ++i)
      bytes += transfers[i].staged_bytes();
    if (from == to || (from != rank_ && to != rank_)) continue;
    const bool sends = from == rank_;
    CollectiveSpan& message = staging.messages.emplace_back();
    message.count = bytes;
    absl::Status called;
    if (sends) {
      message.send = copy_mirror_.Of(staging.send.data(), 0) + sent;
      sent += bytes;
      called = control_->Send(*reduce_, {&message, 1}, DType::kInt8, to);
    } else {
      message.receive = copy_mirror_.Of(staging.receive.data(), CopyStaging::kBytesMax) + received;
      received += bytes;
      called = control_->Receive(*reduce_, {&message, 1}, DType::kInt8, from);
    }
    if (!called.ok()) control_->Abort(called);
  }
  copy_mirror_.Download(*reduce_, CopyStaging::kBytesMax, received);
  reduce_->WaitIdle();
  copy_mirror_.Take(staging.receive.data(), CopyStaging::kBytesMax, received);
  EBB_RETURN_IF_ERROR(control_->status());
  int64_t unpacked = 0;
  for (const Transfer& transfer : transfers) {
    if (transfer.to != rank_ || transfer.from == rank_) continue;
    const std::byte* const received_values = staging.receive.data() + unpacked;
    EBB_RETURN_IF_ERROR(
        visit(*this, transfer.destination, transfer.begin, transfer.end - transfer.begin,
              Access::kWrite, [&](std::byte* to, DType dtype, int64_t first, int64_t length) {
                optim::Cast(team, received_values + first * SizeOf(transfer.dtype), transfer.dtype,
                            to, dtype, length, optim::Rounding::kParameter);
                return absl::OkStatus();
              }));
    unpacked += transfer.staged_bytes();
  }
  return absl::OkStatus();
}

}  // namespace ebb
