#include "ebb/runtime/comm/mpi/library.h"

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/mpi/endpoint.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/device/machine.h"
#include "ebb/runtime/device/thread_limit.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

const char* LevelName(int level) {
  static constexpr const char* kNames[] = {"MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED",
                                           "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE"};
  return kNames[level];
}

}  // namespace

// Never destroyed: messages may outlive every other object. Call it after LoadOpenMpi.
MpiLibrary& MpiLibrary::TheLibrary() {
  static MpiLibrary* const library = new MpiLibrary(**LoadOpenMpi());
  return *library;
}

absl::Status MpiLibrary::ToStatus(std::string_view what, int result) const {
  if (result == OpenMpi::kSuccess) return absl::OkStatus();
  char text[OpenMpi::kErrorTextBytes] = {};
  int length = 0;
  mpi_.Error_string(result, text, &length);
  return absl::UnavailableError(
      absl::StrCat(absl::string_view(what.data(), what.size()), " failed: ", text));
}

absl::StatusOr<MpiLibrary*> MpiLibrary::Get(double timeout_seconds) {
  static std::mutex once;
  const std::scoped_lock lock(once);
  EBB_ASSIGN_OR_RETURN(const OpenMpi* mpi, LoadOpenMpi());
  MpiLibrary& library = TheLibrary();
  int finalized = 0, initialised = 0;
  mpi->Finalized(&finalized);
  if (finalized != 0) {
    return absl::FailedPreconditionError(
        "this program has called MPI_Finalize: make the world before that");
  }
  mpi->Initialized(&initialised);
  if (initialised == 0 || library.owned_) {
    EBB_RETURN_IF_ERROR(library.Initialise(timeout_seconds));
    return &library;
  }
  int level = OpenMpi::kThreadSingle;
  mpi->Query_thread(&level);
  if (level < OpenMpi::kThreadMultiple) {
    return absl::FailedPreconditionError(
        absl::StrCat("this program has initialised MPI with ", LevelName(level),
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
  const auto waited = [](double seconds) {
    return absl::StrCat("on host '", HostName(), "' MPI_Init_thread has waited ", seconds,
                        " s: not all processes that the launcher has started have come to it");
  };
  const auto log_wait = [&](double seconds) { LogWarning(waited(std::round(seconds))); };
  if (!AwaitAndLog(
          changed_, [&] { return initialised_.load(std::memory_order_acquire); },
          DeadlineAfter(timeout_seconds), WaitPoint::kSpin, NoticeTimes(), log_wait)) {
    return absl::DeadlineExceededError(waited(timeout_seconds));
  }
  EBB_RETURN_IF_ERROR(ToStatus("MPI_Init_thread", init_result_));
  if (init_level_ >= OpenMpi::kThreadSerialized) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("this MPI gives ", LevelName(init_level_),
                   ", which allows calls from one thread only; Ebb needs MPI_THREAD_SERIALIZED"));
}

void MpiLibrary::OwnFromInitToFinalize() {
  init_result_ = mpi_.Init_thread(nullptr, nullptr, OpenMpi::kThreadMultiple, &init_level_);
  initialised_.store(true, std::memory_order_release);
  changed_.Notify();
  changed_.Await([&] { return end_.load(std::memory_order_acquire) != End::kNone; });
  for (Backoff backoff; end_.load(std::memory_order_acquire) == End::kMeets; backoff.Pause())
    MoveMessages();
  if (end_.load(std::memory_order_acquire) == End::kFinalizes) mpi_.Finalize();
}

// MPI moves messages in any of its calls.
void MpiLibrary::MoveMessages() {
  const std::scoped_lock lock(mutex_);
  if (worlds_.empty()) return;  // MPI may end
  for (const World& world : worlds_) {
    if (world.store->failure()->is_set()) return;
  }
  int found = 0;
  mpi_.Iprobe(OpenMpi::kAnySource, OpenMpi::kAnyTag, mpi_.comm_world, &found, nullptr);
}

void MpiLibrary::MoveWhatWaits() {
  constexpr int kLooks = 200;  // 5 ms
  Backoff backoff;
  for (int look = 0; look < kLooks; ++look) {
    MoveMessages();
    backoff.Pause();
  }
}

void MpiLibrary::AtExit() {
  std::vector<World> ended;
  {
    const std::scoped_lock lock(mutex_);
    exiting_ = true;
    int finalized = 0;
    if (initialised_.load(std::memory_order_acquire)) mpi_.Finalized(&finalized);
    const bool ready =
        initialised_.load(std::memory_order_acquire) && init_result_ == OpenMpi::kSuccess;
    if (!ready || finalized != 0) return;
    if (begun_ > 0 || failed_ || worlds_.empty()) return;
    ended = worlds_;
  }
  const auto enter = [this](End end) {
    end_.store(end, std::memory_order_release);
    changed_.Notify();
  };
  enter(End::kMeets);
  for (const World& world : ended) {
    if (!world.store->MeetLast(world.timeout_seconds)) return enter(End::kFails);
  }
  {
    const std::scoped_lock lock(mutex_);
    worlds_.clear();
  }
  enter(End::kFinalizes);
  thread_.join();
}

void MpiLibrary::WorldBegins(std::shared_ptr<Store> store, double timeout_seconds) {
  const std::scoped_lock lock(mutex_);
  ++begun_;
  worlds_.push_back({.store = std::move(store), .timeout_seconds = timeout_seconds});
}

void MpiLibrary::WorldEnds(const std::shared_ptr<Store>& store) {
  // True also for a rank that has died since then: MPI may wait for it in any later call.
  const bool failed = store->failure()->is_set();
  if (!failed) store->Leave();
  bool late = false;
  std::vector<World> not_met;  // destroyed without the lock, because that waits for threads
  {
    const std::scoped_lock lock(mutex_);
    failed_ = failed_ || failed;
    if (failed || !owned_)
      std::erase_if(worlds_, [&](const World& world) { return world.store == store; });
    for (World& world : worlds_) world.has_ended = world.has_ended || world.store == store;
    not_met = TakeNotMetLocked();
    late = --begun_ == 0 && exiting_ && owned_;
  }
  // A world in a static object outlives the functions that are registered to run at exit.
  if (late) AtExit();
}

std::vector<MpiLibrary::World> MpiLibrary::TakeNotMetLocked() {
  std::vector<World> taken;
  int size = 0;
  if (mpi_.Comm_size(mpi_.comm_world, &size) != OpenMpi::kSuccess) return taken;
  const auto last = std::find_if(worlds_.rbegin(), worlds_.rend(), [&](const World& world) {
    return world.has_ended && world.store->participants().size() == static_cast<size_t>(size);
  });
  if (last == worlds_.rend()) return taken;
  const auto first_kept = std::stable_partition(worlds_.begin(), std::prev(last.base()),
                                                [](const World& world) { return world.has_ended; });
  taken.assign(std::make_move_iterator(worlds_.begin()), std::make_move_iterator(first_kept));
  worlds_.erase(worlds_.begin(), first_kept);
  return taken;
}

void MpiLibrary::WorldNotMade() {
  const std::scoped_lock lock(mutex_);
  failed_ = true;
}

bool MpiLibrary::TestLocked(OpenMpi::Request& request, int& result) const {
  int complete = 0;
  result = mpi_.Test(&request, &complete, nullptr);
  if (complete != 0) request = nullptr;
  return complete != 0;
}

}  // namespace ebb
