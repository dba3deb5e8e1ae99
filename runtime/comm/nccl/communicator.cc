#include "ebb/runtime/comm/nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/packer.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/driver_memory.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

constexpr double kWatchesPerTimeout = 20;
constexpr double kWatchSecondsMax = 0.1;
// A rank waits so long for the others to be done too, but nothing depends on it.
constexpr double kCloseSecondsMax = 10;
constexpr std::chrono::microseconds kPauseUntilEmpty{200};

constexpr char kUnknownRanks[] =
    "other ranks, of which NCCL does not say which are missing: look for a rank that has ended, "
    "failed or called something else, or raise ebb.timeout_seconds";

std::chrono::nanoseconds WatchPeriod(double timeout_seconds) {
  return std::chrono::nanoseconds(
      static_cast<int64_t>(1e9 * std::min(timeout_seconds / kWatchesPerTimeout, kWatchSecondsMax)));
}

ncclConfig_t NonBlocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

// Ranks that cannot reach each other any more have failed for good.
template <class T>
absl::StatusOr<T> OrFailed(Store& store, absl::StatusOr<T> result) {
  const absl::Status lost = result.status();
  if (!absl::IsDeadlineExceeded(lost) && !absl::IsUnavailable(lost)) return result;
  store.Fail(lost);
  return store.status();
}

// The id that the group's first rank has made.
absl::StatusOr<ncclUniqueId> AgreeOnId(const NcclCommunicator::Parts& parts) {
  StoreGroup& group = *parts.group;
  ncclUniqueId id = {};
  absl::Status made;
  if (group.rank() == 0) {
    const CudaCurrent current(parts.device.ordinal());
    made = NcclStatus(parts.nccl, parts.nccl.GetUniqueId(&id), nullptr, "ncclGetUniqueId");
  }
  const std::string mine =
      Packer()
          .Add(made, parts.nccl.version, std::string_view(id.internal, sizeof(id.internal)))
          .Take();
  EBB_ASSIGN_OR_RETURN(
      const std::vector<std::string> texts,
      OrFailed(group.store(), group.AllGather(mine, CreationSeconds(parts.options))));
  int first_version = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    int version = 0;
    std::string bytes;
    if (!Unpacker(texts[i]).Read(made, version, bytes) || bytes.size() != sizeof(id.internal))
      return absl::DataLossError("what a rank said about a new communicator cannot be read");
    if (!made.ok()) return RankFailedStatus(group.world_ranks()[i], made);
    if (i == 0) {
      first_version = version;
      std::copy(bytes.begin(), bytes.end(), id.internal);
    }
    if (version == first_version) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", group.world_ranks()[0], " has NCCL ", NcclVersionText(first_version),
                     " and rank ", group.world_ranks()[i], " has ", NcclVersionText(version),
                     ": all ranks of a world need the same"));
  }
  return id;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NcclCommunicator::Form(Parts parts,
                                                                            StoreGroup& world) {
  Store& store = world.store();
  EBB_RETURN_IF_ERROR(store.status());
  const double seconds = CreationSeconds(parts.options);
  EBB_ASSIGN_OR_RETURN(const std::shared_ptr<StoreGroup> group,
                       OrFailed(store, world.Form({.options = parts.options})));
  parts.group = group;
  EBB_ASSIGN_OR_RETURN(const ncclUniqueId id, AgreeOnId(parts));
  absl::StatusOr<std::unique_ptr<NcclCommunicator>> connected = Connect(std::move(parts), id);
  // The others may be waiting for this rank inside NCCL, and only a failure ends that wait.
  if (!connected.ok()) {
    store.Fail(RankFailedStatus(store.rank(), connected.status()));
    return store.status();
  }
  // The others cannot use a communicator that one rank lacks.
  EBB_RETURN_IF_ERROR(OrFailed(store, group->AllGather("", seconds)).status());
  return *std::move(connected);
}

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Connect(
    Parts parts, const ncclUniqueId& id) {
  const auto deadline = DeadlineAfter(parts.options.timeout_seconds);
  const DriverMemory::Measured measured(parts.device);
  EBB_ASSIGN_OR_RETURN(parts.grids, StreamMover::Load(parts.device));
  // A failure of another rank ends the wait.
  EBB_ASSIGN_OR_RETURN(
      const std::shared_ptr<NcclChannel> channel,
      NcclChannel::Create(parts.nccl, parts.device.ordinal(), parts.group->store().failure()));
  EBB_RETURN_IF_ERROR(channel->Call("ncclCommInitRankConfig", [&](ncclComm_t& comm) {
    ncclConfig_t config = NonBlocking();
    return parts.nccl.CommInitRankConfig(&comm, parts.group->size(), id, parts.group->rank(),
                                         &config);
  }));
  const absl::Status ready = channel->AwaitReady(deadline);
  if (absl::IsDeadlineExceeded(ready) && ready.message().empty())
    return LateCreationStatus(parts.options, kUnknownRanks);
  EBB_RETURN_IF_ERROR(ready);
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<InFlight> in_flight, InFlight::Create(parts.device));
  EBB_ASSIGN_OR_RETURN(Buffer barrier, parts.device.Allocate(1, "a communicator's barrier"));
  std::unique_ptr<NcclCommunicator> communicator(new NcclCommunicator(
      std::move(parts), std::move(channel), std::move(in_flight), std::move(barrier)));
  try {
    communicator->watch_ = std::thread([raw = communicator.get()] { raw->Watch(); });
  } catch (const std::system_error& error) {
    return NoThread(absl::StrCat("cannot start the thread that watches communicator '",
                                 communicator->parts_.options.name, "'"),
                    error);
  }
  return communicator;
}

NcclCommunicator::NcclCommunicator(Parts parts, std::shared_ptr<NcclChannel> channel,
                                   std::unique_ptr<InFlight> in_flight, Buffer barrier)
    : parts_(std::move(parts)),
      members_{parts_.options, parts_.group->world_ranks(), parts_.group->rank(),
               parts_.group->hosts()},
      channel_(std::move(channel)),
      in_flight_(std::move(in_flight)),
      barrier_(std::move(barrier)),
      group_{
          .rank = parts_.group->rank(), .size = parts_.group->size(), .barrier = barrier_.data()} {
  if (CallOrder* const calls = store().calls())
    lane_.emplace(calls->cycles(), parts_.group->name());
}

NcclCommunicator::~NcclCommunicator() {
  Leave();
  stop_.store(true, std::memory_order_release);
  changed_.Notify();
  if (watch_.joinable()) watch_.join();
  const DriverMemory::Measured measured(parts_.device);
  channel_->Deregister();
  channel_->Close(DeadlineAfter(std::min(parts_.options.timeout_seconds, kCloseSecondsMax)));
}

void NcclCommunicator::Leave() {
  if (std::exchange(left_, true)) return;
  while (!in_flight_->empty()) std::this_thread::sleep_for(kPauseUntilEmpty);
  if (channel_->failed()) return;
  store().LeaveCommunicator(
      parts_.group->name(), group_.size,
      {.name = members_.Me(), .calls = calls_.load(std::memory_order_acquire)});
}

absl::Status NcclCommunicator::Enqueue(Stream& stream, const Collective& call) {
  const bool in_order = ordered_sums_.has_value() && IsReduction(call);
  if (!in_order) EBB_RETURN_IF_ERROR(CheckForNccl(call));
  if (stream.view().native == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "communicator '", parts_.options.name, "' connects GPUs: its operations need a stream of ",
        parts_.device.description()));
  }
  if (channel_->failed()) return absl::OkStatus();
  const CallSummary summary = Summarise(call);
  // The other ranks do not count an exchange between two ranks.
  const bool is_collective = !IsPointToPoint(call.kind);
  if (is_collective) calls_.fetch_add(1, std::memory_order_acq_rel);
  const uint64_t calls = calls_.load(std::memory_order_acquire);
  if (lane_.has_value()) lane_->Enqueued(calls);
  calling_.store(true, std::memory_order_release);
  changed_.Notify();
  const absl::Cleanup called = [this] { calling_.store(false, std::memory_order_release); };
  // NCCL connects ranks and loads kernels when it first needs them.
  std::optional<DriverMemory::Measured> measured;
  if (!std::exchange(has_called_[static_cast<int>(call.kind)], true))
    measured.emplace(parts_.device);
  in_flight_->Begin(stream, summary, is_collective ? calls : 0);
  absl::Status enqueued = in_order ? EnqueueSums(stream, call) : EnqueueNow(stream, call);
  in_flight_->End(stream);
  if (enqueued.ok()) enqueued = stream.status();
  if (enqueued.ok() || channel_->failed()) return absl::OkStatus();
  const bool late = absl::IsDeadlineExceeded(enqueued) && enqueued.message().empty();
  store().Fail(late ? members_.Late(summary, kUnknownRanks) : Named(enqueued, summary));
  return absl::OkStatus();
}

absl::Status NcclCommunicator::EnqueueNow(Stream& stream, const Collective& call) {
  const std::string_view name = Name(call.kind);
  const auto native = static_cast<cudaStream_t>(stream.view().native);
  const NcclScale scale = ScaleFor(call, group_.size);
  const bool multiplies = scale.inputs != 1;
  ncclRedOp_t op = PlainOp(call.op);
  EBB_RETURN_IF_ERROR(channel_->Call(name, [&](ncclComm_t& comm) {
    if (multiplies) {
      Float16 factor(scale.inputs);
      const ncclResult_t made = parts_.nccl.RedOpCreatePreMulSum(&op, &factor, ncclFloat16,
                                                                 ncclScalarHostImmediate, comm);
      if (made != ncclSuccess) return made;
    }
    return EnqueueGroup(parts_.nccl, comm, group_, call, op, native);
  }));
  // The next operation, on this communicator or another, is enqueued behind this one.
  EBB_RETURN_IF_ERROR(channel_->AwaitReady(DeadlineAfter(parts_.options.timeout_seconds)));
  if (multiplies) {
    EBB_RETURN_IF_ERROR(channel_->Call(
        "ncclRedOpDestroy", [&](ncclComm_t& comm) { return parts_.nccl.RedOpDestroy(op, comm); }));
  }
  if (scale.sum == 1) return absl::OkStatus();
  StreamMover mover(parts_.device, *parts_.grids, stream);
  ScaleReceived(mover, call, scale.sum);
  return mover.status();
}

absl::Status NcclCommunicator::EnqueueSums(Stream& stream, const Collective& call) {
  const std::string_view name = Name(call.kind);
  const auto native = static_cast<cudaStream_t>(stream.view().native);
  StreamMover mover(parts_.device, *parts_.grids, stream);
  const auto exchange = [&](std::span<const OrderedSums::Message> messages) -> absl::Status {
    EBB_RETURN_IF_ERROR(channel_->Call(name, [&](ncclComm_t& comm) {
      return EnqueueMessages(parts_.nccl, comm, messages, native);
    }));
    return channel_->AwaitReady(DeadlineAfter(parts_.options.timeout_seconds));
  };
  EBB_RETURN_IF_ERROR(ordered_sums_->Run(call, exchange, mover));
  return mover.status();
}

absl::Status NcclCommunicator::SumInOrder(std::span<std::byte> scratch) {
  EBB_RETURN_IF_ERROR(OrderedSums::CheckScratch(scratch, group_.size));
  ordered_sums_.emplace(group_.rank, group_.size, parts_.options.reduction_group, scratch);
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Register(std::span<std::byte> memory) {
  if (memory.empty() || channel_->failed()) return absl::OkStatus();
  calls_.fetch_add(1, std::memory_order_acq_rel);
  ++registering_calls_;
  calling_.store(true, std::memory_order_release);
  changed_.Notify();
  const absl::Cleanup called = [this] { calling_.store(false, std::memory_order_release); };
  const DriverMemory::Measured measured(parts_.device);
  const absl::Status added =
      channel_->Register(memory, DeadlineAfter(parts_.options.timeout_seconds));
  if (added.ok() || absl::IsUnimplemented(added) || channel_->failed()) return added;
  const bool late = absl::IsDeadlineExceeded(added) && added.message().empty();
  const std::string why =
      late ? absl::StrCat("other ranks have not come within ", parts_.options.timeout_seconds, " s")
           : std::string(added.message());
  const absl::Status named(
      added.code(),
      absl::StrCat(members_.Me(), " registering ", memory.size(), " bytes on communicator '",
                   parts_.options.name, "': ", why, "; ebb.register_buffers false does without"));
  // The communicator cannot be used any more.
  if (late || !channel_->AsynchronousError().ok()) store().Fail(named);
  return named;
}

// After it all ranks have made the same number of calls, also a rank where NCCL has refused a
// buffer and that has registered no later ones.
void NcclCommunicator::Deregister() {
  channel_->Deregister();
  calls_.fetch_sub(std::exchange(registering_calls_, 0), std::memory_order_acq_rel);
}

void NcclCommunicator::Abort(absl::Status why) {
  store().Fail(members_.Aborted(why));
}

void NcclCommunicator::Watch() {
  const CudaCurrent current(parts_.device.ordinal());
  // Requests of this thread to CUDA are harmless while another captures a graph.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const auto stopped = [this] { return stop_.load(std::memory_order_acquire); };
  const std::chrono::nanoseconds period = WatchPeriod(parts_.options.timeout_seconds);
  const auto busy = [this] {
    return !channel_->failed() &&
           (calling_.load(std::memory_order_acquire) || !in_flight_->empty());
  };
  while (!stopped()) {
    changed_.Await([&] { return stopped() || busy(); });
    while (!stopped() && busy()) {
      if (absl::Status wrong = WhatIsWrong(); !wrong.ok()) store().Fail(wrong);
      LogIfWaiting();
      changed_.Await(stopped, WaitPoint::Clock::now() + period, std::chrono::nanoseconds(0));
    }
  }
}

absl::Status NcclCommunicator::WhatIsWrong() {
  EBB_RETURN_IF_ERROR(LeftByAnother());
  const std::optional<CallSummary> late = in_flight_->Late(parts_.options.timeout_seconds);
  if (late) return members_.Late(*late, kUnknownRanks);
  absl::Status error = channel_->AsynchronousError();
  if (error.ok()) error = parts_.device.status();
  if (error.ok() || channel_->failed()) return absl::OkStatus();
  return absl::Status(error.code(), absl::StrCat(members_.Me(), " on communicator '",
                                                 parts_.options.name, "': ", error.message()));
}

// NCCL does not say which ranks are missing. The last calls of the ranks may.
void NcclCommunicator::LogIfWaiting() {
  const NoticeTimes& times = parts_.options.notices;
  const double sends_after = times.first_seconds / 5;  // the others compare them
  const std::optional<CallSummary> call = in_flight_->Late(sends_after);
  if (!call.has_value() || channel_->failed()) {
    notice_.reset();
    if (lane_.has_value()) lane_->End();
    return;
  }
  CallOrder* const order = store().calls();
  if (!notice_.has_value()) {
    notice_.emplace(NoticeTimes{.first_seconds = times.first_seconds - sends_after,
                                .interval_seconds = times.interval_seconds});
    if (const absl::Status apart = LookForCycle(); !apart.ok()) store().Fail(apart);
    store().SendCalls();
  }
  const std::optional<double> more_seconds = notice_->Take();
  if (!more_seconds.has_value()) return;
  std::vector<int> behind;
  for (int rank = 0; order != nullptr && rank < static_cast<int>(store().participants().size());
       ++rank) {
    if (order->IsBehind(rank)) behind.push_back(rank);
  }
  const std::string known = store().CompareCalls(behind);
  // For an exchange: one of the first two ranks may be the missing one, or both are.
  const bool logs =
      IsPointToPoint(call->kind) || group_.rank <= 1 || (order != nullptr && order->IsFirstHere());
  if (!logs) return;
  members_.LogWait(sends_after + *more_seconds, *call, "other ranks", known);
}

// NCCL does not say which ranks are missing: perhaps all others.
absl::Status NcclCommunicator::LookForCycle() {
  if (!lane_.has_value()) return absl::OkStatus();
  std::vector<int> others = members_.world_ranks;
  std::erase(others, members_.world_rank(members_.rank));
  return lane_->WaitsIn(in_flight_->collective(), others);
}

absl::Status NcclCommunicator::LeftByAnother() {
  const std::optional<LeftRank> left = store().FirstToLeave(parts_.group->name());
  const uint64_t calls = calls_.load(std::memory_order_acquire);
  if (!left.has_value() || left->calls >= calls) return absl::OkStatus();
  return members_.Left(left->name,
                       absl::StrCat("it has destroyed it after ", left->calls, " calls, of which ",
                                    members_.Me(), " has made ", calls));
}

absl::Status NcclCommunicator::Named(const absl::Status& error, const CallSummary& call) const {
  return absl::Status(error.code(),
                      absl::StrCat(members_.Me(), " in ", Describe(call), " on communicator '",
                                   parts_.options.name, "': ", error.message()));
}

}  // namespace ebb
