#include "ebb/runtime/comm/mpi/library.h"

#include <pthread.h>

#include <cmath>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/thread_limit.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// Never destroyed: messages may outlive every other object.
MpiLibrary& TheLibrary() {
  static MpiLibrary* const library = new MpiLibrary();
  return *library;
}

std::string_view LevelName(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    default:
      return "MPI_THREAD_MULTIPLE";
  }
}

}  // namespace

absl::Status MpiLibrary::ToStatus(std::string_view what, int result) {
  if (result == MPI_SUCCESS) return absl::OkStatus();
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(result, text, &length);
  return absl::UnavailableError(
      absl::StrCat(absl::string_view(what.data(), what.size()), " failed: ", text));
}

absl::StatusOr<MpiLibrary*> MpiLibrary::Get(double timeout_seconds) {
  static std::mutex once;
  const std::scoped_lock lock(once);
  MpiLibrary& library = TheLibrary();
  int finalized = 0, initialised = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) {
    return absl::FailedPreconditionError(
        "this program has called MPI_Finalize: make the world before that");
  }
  MPI_Initialized(&initialised);
  if (initialised == 0 || library.owned_) {
    EBB_RETURN_IF_ERROR(library.Initialise(timeout_seconds));
    return &library;
  }
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) {
    const std::string_view name = LevelName(level);
    return absl::FailedPreconditionError(absl::StrCat(
        "this program has initialised MPI with ", absl::string_view(name.data(), name.size()),
        ", but Ebb calls it from threads of its own: call MPI_Init_thread with "
        "MPI_THREAD_MULTIPLE, or leave it to Ebb"));
  }
  return &library;
}

absl::Status MpiLibrary::Initialise(double timeout_seconds) {
  if (!owned_) {
    try {
      thread_ = std::thread([this] { OwnFromInitToFinalize(); });
    } catch (const std::system_error& error) {
      return NoThread("no thread for MPI", error);
    }
    owned_ = true;
    pthread_setname_np(thread_.native_handle(), "ebb-mpi");
    std::atexit([] { TheLibrary().AtExit(); });
  }
  const auto say = [](double seconds) {
    LogWarning(absl::StrCat("MPI_Init_thread has waited ", std::round(seconds),
                            " s: not all processes that the launcher has started have come to it"));
  };
  if (!AwaitAndSay(
          changed_, [&] { return initialised_.load(std::memory_order_acquire); },
          DeadlineAfter(timeout_seconds), WaitPoint::kSpin, NoticeTimes(), say)) {
    return absl::DeadlineExceededError(
        absl::StrCat("MPI_Init_thread has waited ", timeout_seconds,
                     " s: not all processes that the launcher has started have come to it"));
  }
  EBB_RETURN_IF_ERROR(ToStatus("MPI_Init_thread", init_result_));
  if (init_level_ >= MPI_THREAD_SERIALIZED) return absl::OkStatus();
  const std::string_view name = LevelName(init_level_);
  return absl::FailedPreconditionError(
      absl::StrCat("this MPI gives ", absl::string_view(name.data(), name.size()),
                   ", which allows calls from one thread only; Ebb needs MPI_THREAD_SERIALIZED"));
}

void MpiLibrary::OwnFromInitToFinalize() {
  init_result_ = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &init_level_);
  initialised_.store(true, std::memory_order_release);
  changed_.Notify();
  changed_.Await([&] { return finalize_.load(std::memory_order_acquire); });
  MPI_Finalize();
}

void MpiLibrary::AtExit() {
  {
    const std::scoped_lock lock(mutex_);
    exiting_ = true;
    int finalized = 0;
    if (initialised_.load(std::memory_order_acquire)) MPI_Finalized(&finalized);
    const bool ready = initialised_.load(std::memory_order_acquire) && init_result_ == MPI_SUCCESS;
    if (!ready || finalized != 0) return;
    if (worlds_ > 0 || failed_ || !one_has_ended_well_) return;
  }
  finalize_.store(true, std::memory_order_release);
  changed_.Notify();
  thread_.join();
}

void MpiLibrary::WorldBegins() {
  const std::scoped_lock lock(mutex_);
  ++worlds_;
}

void MpiLibrary::WorldEnds(bool failed) {
  bool late = false;
  {
    const std::scoped_lock lock(mutex_);
    (failed ? failed_ : one_has_ended_well_) = true;
    late = --worlds_ == 0 && exiting_ && owned_;
  }
  // A world in a static object outlives the functions that are registered to run at exit.
  if (late) AtExit();
}

void MpiLibrary::WorldNotMade() {
  const std::scoped_lock lock(mutex_);
  failed_ = true;
}

void MpiLibrary::BuryLocked(MPI_Request request, std::shared_ptr<std::byte[]> memory) {
  std::erase_if(buried_, [](Buried& buried) {
    int complete = 0;
    return MPI_Test(&buried.request, &complete, MPI_STATUS_IGNORE) != MPI_SUCCESS || complete != 0;
  });
  buried_.push_back({.request = request, .memory = std::move(memory)});
}

}  // namespace ebb
