// The MPI of this process, initialised by us or by the program. All of our calls are made by one
// thread at a time, so MPI_THREAD_SERIALIZED is enough where nothing else calls it; a program that
// has initialised MPI may call it at any time, and needs MPI_THREAD_MULTIPLE. The calls are all
// short ones: nothing here waits inside MPI, because MPI's waits burn a core and have no time-out.
#pragma once

#include <mpi.h>

#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class MpiLibrary {
 public:
  // Initialises MPI if that is still to do, on a thread of its own, which also ends it at exit: so a rank
  // that never comes to MPI_Init costs the others the time-out and no more.
  static absl::StatusOr<MpiLibrary*> Get(double timeout_seconds);

  // Of a call's result; `what` names the call.
  static absl::Status ToStatus(std::string_view what, int result);

  std::mutex& mutex() { return mutex_; }

  // Only a program whose worlds have all ended well waits at exit in MPI_Finalize for the other
  // ranks. After one has failed, or could not be made, or while there is one, they may never come
  // there: the launcher sees that it ends without, and ends the job.
  void WorldBegins();
  void WorldEnds(bool failed);
  void WorldNotMade();

  // Messages that no thread waits for any more, until they are complete or the process ends. With
  // mutex() held.
  void BuryLocked(MPI_Request request, std::shared_ptr<std::byte[]> memory);
  // Memory of messages that MPI is not asked about any more.
  void KeepLocked(std::shared_ptr<std::byte[]> memory) { kept_.push_back(std::move(memory)); }

 private:
  struct Buried {
    MPI_Request request;
    std::shared_ptr<std::byte[]> memory;
  };
  absl::Status Initialise(double timeout_seconds);
  void OwnFromInitToFinalize();
  void AtExit();

  std::mutex mutex_;  // of MPI and of what follows
  std::vector<Buried> buried_;
  std::vector<std::shared_ptr<std::byte[]>> kept_;
  int worlds_ = 0;
  bool one_has_ended_well_ = false;
  bool failed_ = false;
  bool exiting_ = false;

  // Of the thread that has initialised MPI.
  bool owned_ = false;
  std::thread thread_;
  std::atomic<bool> initialised_{false};
  int init_result_ = MPI_SUCCESS;
  int init_level_ = MPI_THREAD_SINGLE;
  std::atomic<bool> finalize_{false};
  WaitPoint changed_;
};

}  // namespace ebb
