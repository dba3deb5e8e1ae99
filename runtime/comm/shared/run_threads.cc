#include <pthread.h>

#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/cpu/core_share.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

absl::Status RunRank(const std::shared_ptr<SharedWorld>& world,
                     const std::function<absl::Status(World)>& body) {
  const CoreShare share(world->size());
  const auto handle = std::make_shared<SharedRank>(world);
  absl::Status status = body(World(handle));
  if (!status.ok()) world->NoteFailure(world->rank());
  world->Leave(status.ok() ? "its thread has ended"
                           : absl::StrCat("its thread has ended with ", status.ToString()));
  return status;
}

}  // namespace

absl::Status RunThreads(int ranks, std::function<absl::Status(World)> body) {
  if (ranks < 1)
    return absl::InvalidArgumentError(absl::StrCat("cannot run ", ranks, " ranks; at least 1"));
  if (body == nullptr) return absl::InvalidArgumentError("RunThreads without a function to run");
  const auto world = std::make_shared<ThreadWorld>(ranks);
  std::vector<absl::Status> statuses(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    absl::Status& status = statuses[static_cast<size_t>(rank)];
    try {
      threads.emplace_back(
          [&world, rank, &body, &status] { status = RunRank(world->rank(rank), body); });
    } catch (const std::system_error& error) {
      status = NoThread("cannot start a thread for this rank", error);
      world->rank(rank)->Fail(RankFailedStatus(rank, status));
      break;
    }
    pthread_setname_np(threads.back().native_handle(), absl::StrCat("ebb-rank-", rank).c_str());
  }
  for (std::thread& thread : threads) thread.join();
  for (const int rank : world->failures()) {
    const absl::Status& status = statuses[static_cast<size_t>(rank)];
    if (!status.ok()) return OfRank(rank, status);
  }
  return absl::OkStatus();
}

}  // namespace ebb
