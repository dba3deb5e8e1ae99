// The MPI of this process, initialised by us or by the program. All of our calls are made by one
// thread at a time, so MPI_THREAD_SERIALIZED is enough if only we call MPI. A program that has
// initialised MPI may call it at any time, and needs MPI_THREAD_MULTIPLE. All our calls are short:
// nothing waits inside MPI, because MPI's waits burn a core and have no time-out.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/mpi/open_mpi.h"
#include "ebb/runtime/comm/rendezvous/store.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class MpiLibrary {
 public:
  // Opens and initialises MPI if needed, on a thread of its own, which also ends MPI at exit. So a
  // rank that never comes to MPI_Init costs the others the time-out and no more.
  static absl::StatusOr<MpiLibrary*> Get(double timeout_seconds);

  const OpenMpi& mpi() const { return mpi_; }
  // `result`: of a call. `what`: the name of the call.
  absl::Status ToStatus(std::string_view what, int result) const;
  // Whether a request has ended; it is null then. `result`: of the look. Call it with mutex() held.
  bool TestLocked(OpenMpi::Request& request, int& result) const;

  std::mutex& mutex() { return mutex_; }

  // MPI moves messages only while it is called. A rank that has ended an operation may still hold
  // MPI's own answer to a message, for which another rank waits; this moves it. Any thread.
  void MoveWhatWaits();

  // A program waits at exit for the other ranks, and then calls MPI_Finalize, only if all of its
  // worlds have ended well. After a world has failed, could not be made, or still exists, the other
  // ranks may never come there. The process then ends without MPI_Finalize, and the launcher ends
  // the job.
  //
  // The ranks wait for each other in their stores. MPI_Finalize does not wait for ranks that srun
  // has started: it would end connections that other ranks still use.
  void WorldBegins(std::shared_ptr<Store> store, double timeout_seconds);
  void WorldEnds(const std::shared_ptr<Store>& store);
  void WorldNotMade();

  // Keeps memory of messages that MPI is not asked about any more, until the process ends. Call it
  // with mutex() held.
  void KeepLocked(std::shared_ptr<void> memory) { kept_.push_back(std::move(memory)); }

 private:
  explicit MpiLibrary(const OpenMpi& mpi) : mpi_(mpi) {}
  absl::Status Initialise(double timeout_seconds);
  static MpiLibrary& TheLibrary();
  void OwnFromInitToFinalize();
  void MoveMessages();
  void AtExit();

  const OpenMpi& mpi_;
  std::mutex mutex_;  // of MPI and of what follows
  std::vector<std::shared_ptr<void>> kept_;
  struct World {
    std::shared_ptr<Store> store;
    double timeout_seconds = 0;
    bool has_ended = false;
  };
  // Removes those whose ranks meet at exit in a later one of all ranks, which has ended, too.
  std::vector<World> TakeNotMetLocked();
  // Worlds that have not ended, and worlds that have ended well and wait for the exit, in the order
  // in which they were made, which is the same on all ranks.
  std::vector<World> worlds_;
  int begun_ = 0;  // worlds that have not ended
  bool failed_ = false;
  bool exiting_ = false;

  // Used by the thread that has initialised MPI.
  bool owned_ = false;
  std::thread thread_;
  std::atomic<bool> initialised_{false};
  int init_result_ = OpenMpi::kSuccess;
  int init_level_ = OpenMpi::kThreadSingle;
  // kMeets: the other ranks may still need this one, to take the last messages.
  enum class End : uint8_t { kNone, kMeets, kFinalizes, kFails };
  std::atomic<End> end_{End::kNone};
  WaitPoint changed_;
};

}  // namespace ebb
