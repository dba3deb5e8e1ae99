#include "forked_ranks.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/shared/world.h"

namespace ebb {
namespace {

absl::Status RunRank(const std::string& name, int rank, int ranks,
                     const std::function<absl::Status(World)>& body) {
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous,
                       Rendezvous::Join({.rank = rank,
                                         .size = ranks,
                                         .place = {.host = "", .port = 0, .name = name},
                                         .one_host = true,
                                         .launcher = "a benchmark",
                                         .timeout_seconds = 60}));
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<SharedWorld> world,
                       SharedWorld::Form(rank, std::move(rendezvous)));
  return body(World(std::make_shared<SharedRank>(std::move(world))));
}

}  // namespace

absl::Status RunForked(int ranks, const std::function<absl::Status(World)>& body) {
  static int runs = 0;
  const std::string name = absl::StrCat("ebb-bench-", getpid(), "-", ++runs);
  std::vector<pid_t> others;
  std::fflush(nullptr);
  for (int rank = 1; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) _exit(RunRank(name, rank, ranks, body).ok() ? 0 : 1);
    others.push_back(pid);
  }
  absl::Status status = RunRank(name, 0, ranks, body);
  for (const pid_t pid : others) {
    int state = 0;
    waitpid(pid, &state, 0);
    if (status.ok() && state != 0) status = absl::InternalError("another rank has failed");
  }
  return status;
}

}  // namespace ebb
