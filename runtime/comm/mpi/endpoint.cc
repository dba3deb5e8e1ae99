#include "ebb/runtime/comm/mpi/endpoint.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/launch/launch.h"
#include "ebb/runtime/comm/rendezvous/participant.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// For a collective to which other ranks have not come. MPI cannot say which ranks those are.
absl::Status NotAllHaveCome(MpiLibrary& library, MPI_Comm comm, const char* what) {
  int rank = 0, size = 0;
  const std::scoped_lock lock(library.mutex());
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  return absl::DeadlineExceededError(absl::StrCat(
      Describe(Myself(rank, size, "MPI")), " has waited until its time-out, at the start of the ",
      "world, for the other ranks: not all ", size, " have come there (", what, ")"));
}

// MPI does not say which ranks are missing. So the first two ranks log it, because one of them may
// be the missing one, and so does the first rank of each host, because both may be missing.
void SayNotAllHaveCome(MpiLibrary& library, MPI_Comm comm, double seconds) {
  int rank = 0, size = 1;
  {
    const std::scoped_lock lock(library.mutex());
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
  }
  if (rank > 1 && !IsFirstOfHost(ThisEnvironment())) return;
  LogWarning(absl::StrCat(Describe(Myself(rank, size, "MPI")), " has waited ", std::round(seconds),
                          " s, at the start of the world, for the other ranks: not all ", size,
                          " have come there"));
}

// Waits until a non-blocking collective of `comm` is complete. If it never is, `memory` stays
// allocated, because MPI may still write to it.
absl::Status AwaitRequest(MpiLibrary& library, MPI_Comm comm, MPI_Request request,
                          const MessageMemory& memory, const char* what,
                          WaitPoint::Deadline deadline) {
  Backoff backoff;
  WaitNotice notice{NoticeTimes()};
  absl::Status status;
  for (int complete = 0; status.ok();) {
    {
      const std::scoped_lock lock(library.mutex());
      status = MpiLibrary::ToStatus(what, MPI_Test(&request, &complete, MPI_STATUS_IGNORE));
    }
    if (complete != 0) return status;
    if (WaitPoint::Clock::now() >= deadline) {
      status.Update(NotAllHaveCome(library, comm, what));
    } else {
      if (const std::optional<double> seconds = notice.Take())
        SayNotAllHaveCome(library, comm, *seconds);
      backoff.Pause();
    }
  }
  const std::scoped_lock lock(library.mutex());
  if (request != MPI_REQUEST_NULL) library.BuryLocked(request, memory);
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

MpiMessage& MpiMessage::operator=(MpiMessage&& other) noexcept {
  std::swap(endpoint_, other.endpoint_);
  std::swap(request_, other.request_);
  std::swap(memory_, other.memory_);
  std::swap(is_receive_, other.is_receive_);
  return *this;
}

MpiMessage::~MpiMessage() {
  if (!is_under_way()) return;
  MpiLibrary& library = endpoint_->library();
  const std::scoped_lock lock(library.mutex());
  if (endpoint_->abandoned()) {
    library.KeepLocked(std::move(memory_));
    return;
  }
  int complete = 0;
  if (is_receive_) MPI_Cancel(&request_);
  if (MPI_Test(&request_, &complete, MPI_STATUS_IGNORE) != MPI_SUCCESS || complete != 0) return;
  library.BuryLocked(request_, std::move(memory_));
}

bool MpiMessage::Test() {
  if (endpoint_ == nullptr) return true;
  const std::scoped_lock lock(endpoint_->library().mutex());
  if (endpoint_->abandoned()) return false;
  if (!is_under_way()) return true;
  int complete = 0;
  const int result = MPI_Test(&request_, &complete, MPI_STATUS_IGNORE);
  endpoint_->NoteLocked("MPI_Test", result);
  return result == MPI_SUCCESS && complete != 0;
}

absl::StatusOr<std::unique_ptr<MpiEndpoint>> MpiEndpoint::Open(MpiLibrary& library, MPI_Comm parent,
                                                               WaitPoint::Deadline deadline) {
  const MessageMemory memory(new std::byte[sizeof(MPI_Comm)]);
  MPI_Comm* const comm = new (memory.get()) MPI_Comm(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const std::scoped_lock lock(library.mutex());
    EBB_RETURN_IF_ERROR(
        MpiLibrary::ToStatus("MPI_Comm_idup", MPI_Comm_idup(parent, comm, &request)));
  }
  EBB_RETURN_IF_ERROR(AwaitRequest(library, parent, request, memory, "MPI_Comm_idup", deadline));
  return std::unique_ptr<MpiEndpoint>(new MpiEndpoint(library, *comm));
}

MpiEndpoint::MpiEndpoint(MpiLibrary& library, MPI_Comm comm) : library_(library), comm_(comm) {
  const std::scoped_lock lock(library_.mutex());
  NoteLocked("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
  NoteLocked("MPI_Comm_rank", MPI_Comm_rank(comm_, &rank_));
  NoteLocked("MPI_Comm_size", MPI_Comm_size(comm_, &size_));
  int* most = nullptr;
  int found = 0;
  NoteLocked("MPI_Comm_get_attr", MPI_Comm_get_attr(comm_, MPI_TAG_UB, &most, &found));
  if (found != 0) tag_max_ = *most;
}

void MpiEndpoint::Begin(MpiMessage& message, MessageMemory memory, bool is_receive) {
  message.endpoint_ = this;
  message.memory_ = std::move(memory);
  message.is_receive_ = is_receive;
}

void MpiEndpoint::Send(MpiMessage& message, int to, int tag, MessageMemory memory,
                       const std::byte* data, int64_t bytes) {
  Begin(message, std::move(memory), /*is_receive=*/false);
  const std::scoped_lock lock(library_.mutex());
  if (abandoned()) return;
  NoteLocked("MPI_Isend",
             MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, comm_, &message.request_));
}

void MpiEndpoint::SendToBeTaken(MpiMessage& message, int to, int tag, MessageMemory memory,
                                const std::byte* data, int64_t bytes) {
  Begin(message, std::move(memory), /*is_receive=*/false);
  const std::scoped_lock lock(library_.mutex());
  if (abandoned()) return;
  NoteLocked("MPI_Issend", MPI_Issend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, comm_,
                                      &message.request_));
}

void MpiEndpoint::Receive(MpiMessage& message, int from, int tag, MessageMemory memory,
                          std::byte* data, int64_t bytes) {
  Begin(message, std::move(memory), /*is_receive=*/true);
  const std::scoped_lock lock(library_.mutex());
  if (abandoned()) return;
  NoteLocked("MPI_Irecv", MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, tag, comm_,
                                    &message.request_));
}

absl::StatusOr<std::string> MpiEndpoint::Broadcast(std::string_view mine,
                                                   WaitPoint::Deadline deadline) {
  constexpr size_t kBytes = 2048;
  const MessageMemory memory(new std::byte[kBytes]());
  auto* const text = reinterpret_cast<char*>(memory.get());
  if (rank_ == 0) std::copy_n(mine.data(), std::min(mine.size(), kBytes), text);
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const std::scoped_lock lock(library_.mutex());
    EBB_RETURN_IF_ERROR(MpiLibrary::ToStatus(
        "MPI_Ibcast", MPI_Ibcast(text, kBytes, MPI_BYTE, /*root=*/0, comm_, &request)));
  }
  EBB_RETURN_IF_ERROR(AwaitRequest(library_, comm_, request, memory, "MPI_Ibcast", deadline));
  return std::string(text, kBytes);
}

void MpiEndpoint::NoteLocked(const char* what, int result) {
  if (result == MPI_SUCCESS || failed_.load(std::memory_order_relaxed)) return;
  status_ = MpiLibrary::ToStatus(what, result);
  failed_.store(true, std::memory_order_release);
}

absl::Status MpiEndpoint::status() const {
  if (!failed()) return absl::OkStatus();
  return status_;
}

}  // namespace ebb
