#include "ebb/runtime/comm/mpi/endpoint.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/launch/launch.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/rendezvous/hosts.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// Begins a non-blocking collective of `comm`, and waits until it is complete. If it never is,
// `memory` stays allocated, because MPI may still write to it.
//
// MPI does not say which ranks are missing. So the first two ranks log it, because one of them may
// be the missing one, and so does the first rank of each host, because both may be missing.
absl::Status RunCollective(MpiLibrary& library, OpenMpi::Comm comm, const MessageMemory& memory,
                           const char* what, WaitPoint::Deadline deadline,
                           absl::FunctionRef<int(OpenMpi::Request*)> begin) {
  OpenMpi::Request request = nullptr;
  {
    const std::scoped_lock lock(library.mutex());
    EBB_RETURN_IF_ERROR(library.ToStatus(what, begin(&request)));
  }
  int rank = 0, size = 0;
  const auto test = [&](absl::Status& status) {
    int result = OpenMpi::kSuccess;
    const std::scoped_lock lock(library.mutex());
    const bool has_ended = library.TestLocked(request, result);
    status = library.ToStatus(what, result);
    if (!has_ended && size == 0) {
      library.mpi().Comm_rank(comm, &rank);
      library.mpi().Comm_size(comm, &size);
    }
    return has_ended;
  };
  const auto waited = [&](absl::string_view how_long) {
    return absl::StrCat(Describe(Myself(rank, size, "MPI")), " has waited ", how_long,
                        ", at the start of the world, for the other ranks: not all ", size,
                        " have come there");
  };
  Backoff backoff;
  WaitNotice notice{NoticeTimes()};
  absl::Status status;
  while (!test(status)) {
    if (status.ok() && WaitPoint::Clock::now() >= deadline) {
      status =
          absl::DeadlineExceededError(absl::StrCat(waited("until its time-out"), " (", what, ")"));
    }
    if (!status.ok()) {
      const std::scoped_lock lock(library.mutex());
      library.KeepLocked(memory);
      break;
    }
    if (const std::optional<double> seconds = notice.Take();
        seconds.has_value() && (rank <= 1 || IsFirstOfHost(ThisEnvironment())))
      LogWarning(waited(absl::StrCat(std::round(*seconds), " s")));
    backoff.Pause();
  }
  return status;
}

}  // namespace

void Backoff::Pause() {
  constexpr int kYields = 100;
  constexpr std::chrono::microseconds kShortest{20}, kLongest{1000};
  if (++looks_ <= kYields) {
    std::this_thread::yield();
    return;
  }
  std::this_thread::sleep_for(std::min(kLongest, kShortest * (1 + (looks_ - kYields) / 50)));
}

MpiMessage::~MpiMessage() {
  if (!is_under_way()) return;
  MpiLibrary& library = endpoint_->library();
  const std::scoped_lock lock(library.mutex());
  if (!endpoint_->abandoned()) {
    int result = OpenMpi::kSuccess;
    if (is_receive_) library.mpi().Cancel(&request_);
    if (library.TestLocked(request_, result) || result != OpenMpi::kSuccess) return;
  }
  library.KeepLocked(std::move(memory_));
}

bool MpiMessage::Test() {
  if (endpoint_ == nullptr) return true;
  int result = OpenMpi::kSuccess;
  bool has_ended = false;
  {
    const std::scoped_lock lock(endpoint_->library().mutex());
    if (endpoint_->abandoned()) return false;
    if (!is_under_way()) return true;
    has_ended = endpoint_->library().TestLocked(request_, result);
  }
  endpoint_->Note("MPI_Test", result);
  return has_ended && result == OpenMpi::kSuccess;
}

absl::StatusOr<std::unique_ptr<MpiEndpoint>> MpiEndpoint::Open(MpiLibrary& library,
                                                               OpenMpi::Comm parent,
                                                               WaitPoint::Deadline deadline) {
  const auto comm = std::make_shared<OpenMpi::Comm>(nullptr);
  EBB_RETURN_IF_ERROR(RunCollective(
      library, parent, comm, "MPI_Comm_idup", deadline,
      [&](auto* request) { return library.mpi().Comm_idup(parent, comm.get(), request); }));
  std::unique_ptr<MpiEndpoint> endpoint(new MpiEndpoint(library, *comm));
  const std::scoped_lock lock(library.mutex());
  const OpenMpi& mpi = library.mpi();
  const auto check = [&](const char* what, int result) { return library.ToStatus(what, result); };
  int* most = nullptr;
  int found = 0;
  EBB_RETURN_IF_ERROR(
      check("MPI_Comm_set_errhandler", mpi.Comm_set_errhandler(*comm, mpi.errors_return)));
  EBB_RETURN_IF_ERROR(check("MPI_Comm_rank", mpi.Comm_rank(*comm, &endpoint->rank_)));
  EBB_RETURN_IF_ERROR(check("MPI_Comm_size", mpi.Comm_size(*comm, &endpoint->size_)));
  EBB_RETURN_IF_ERROR(
      check("MPI_Comm_get_attr", mpi.Comm_get_attr(*comm, OpenMpi::kTagUpperBound, &most, &found)));
  if (found != 0) endpoint->tag_max_ = *most;
  return endpoint;
}

MpiEndpoint::~MpiEndpoint() {
  if (store_ != nullptr) library_.WorldEnds(store_);
}

void MpiEndpoint::Hold(std::shared_ptr<Store> store, double timeout_seconds) {
  store_ = std::move(store);
  store_->OnCalls([&library = library_] { library.MoveWhatWaits(); });
  library_.WorldBegins(store_, timeout_seconds);
}

void MpiEndpoint::AwaitSent(absl::FunctionRef<bool()> sent) {
  const WaitPoint::Deadline begin = WaitPoint::Clock::now();
  const WaitPoint::Deadline deadline = begin + patience_.load();
  for (Backoff backoff; !sent() && !abandoned() && WaitPoint::Clock::now() < deadline;)
    backoff.Pause();
  patience_ = std::max(WaitPoint::Clock::duration(0), deadline - WaitPoint::Clock::now());
}

void MpiEndpoint::Send(MpiMessage& message, int to, int tag, MessageMemory memory,
                       const std::byte* data, int64_t bytes, bool to_be_taken) {
  const OpenMpi& mpi = library_.mpi();
  message.endpoint_ = this;
  message.memory_ = std::move(memory);
  message.is_receive_ = false;
  const auto send = to_be_taken ? mpi.Issend : mpi.Isend;
  Call(to_be_taken ? "MPI_Issend" : "MPI_Isend", [&] {
    return send(data, static_cast<int>(bytes), mpi.byte, to, tag, comm_, &message.request_);
  });
}

void MpiEndpoint::Receive(MpiMessage& message, int from, int tag, MessageMemory memory,
                          std::byte* data, int64_t bytes) {
  const OpenMpi& mpi = library_.mpi();
  message.endpoint_ = this;
  message.memory_ = std::move(memory);
  message.is_receive_ = true;
  Call("MPI_Irecv", [&] {
    return mpi.Irecv(data, static_cast<int>(bytes), mpi.byte, from, tag, comm_, &message.request_);
  });
}

absl::StatusOr<std::string> MpiEndpoint::Broadcast(std::string_view mine,
                                                   WaitPoint::Deadline deadline) {
  constexpr int kBytes = 2048;
  const auto text = std::make_shared<std::string>(rank_ == 0 ? mine : "");
  text->resize(kBytes);
  EBB_RETURN_IF_ERROR(
      RunCollective(library_, comm_, text, "MPI_Ibcast", deadline, [&](auto* request) {
        return library_.mpi().Ibcast(text->data(), kBytes, library_.mpi().byte, /*root=*/0, comm_,
                                     request);
      }));
  return *text;
}

void MpiEndpoint::Call(const char* what, absl::FunctionRef<int()> call) {
  int result = OpenMpi::kSuccess;
  {
    const std::scoped_lock lock(library_.mutex());
    if (abandoned()) return;
    result = call();
  }
  Note(what, result);
}

void MpiEndpoint::Note(const char* what, int result) {
  if (result != OpenMpi::kSuccess)
    store_->Fail(RankFailedStatus(rank_, library_.ToStatus(what, result)));
}

}  // namespace ebb
