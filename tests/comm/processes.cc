#include "processes.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <random>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/shared/world.h"

namespace ebb::testing {
namespace {

std::vector<int> forked;

absl::Status RunRank(const std::string& name, int rank, int ranks,
                     const std::function<absl::Status(World)>& body) {
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous,
                       Rendezvous::Join({.rank = rank,
                                         .size = ranks,
                                         .place = {.host = "", .port = 0, .name = name},
                                         .launcher = "a test",
                                         .timeout_seconds = 60}));
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<SharedWorld> world,
                       SharedWorld::Form(rank, std::move(rendezvous)));
  const absl::Status status = body(World(std::make_shared<SharedRank>(std::move(world))));
  if (status.ok() && ::testing::Test::HasFailure())
    return absl::InternalError("what was expected has not come true, see above");
  return status;
}

}  // namespace

void* MakeShared(size_t bytes, absl::FunctionRef<void(void* at)> construct) {
  void* const pages =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  construct(pages);
  return pages;
}

uint64_t RandomSeed() {
  return std::random_device()();
}

std::string NewMeetingName() {
  static int made = 0;
  return absl::StrCat("ebb-test-", getpid(), "-", ++made);
}

std::vector<int> Fork(int ranks, const std::function<int(int rank)>& body,
                      const std::function<void(const std::vector<int>& pids)>& started) {
  std::vector<int> pids, codes;
  std::fflush(nullptr);
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      const int code = body(rank);
      std::fflush(nullptr);
      _exit(code);
    }
    pids.push_back(pid);
    forked.push_back(pid);
  }
  if (started) started(pids);
  for (const int pid : pids) {
    int state = 0;
    waitpid(pid, &state, 0);
    codes.push_back(WIFSIGNALED(state) ? -WTERMSIG(state) : WEXITSTATUS(state));
  }
  return codes;
}

absl::Status RunProcesses(int ranks, std::function<absl::Status(World)> body) {
  const std::string name = NewMeetingName();
  const Shared<SharedStatus> first;
  const std::vector<int> codes = Fork(ranks, [&](int rank) {
    const absl::Status status = RunRank(name, rank, ranks, body);
    if (!status.ok())
      first->TrySet(
          absl::Status(status.code(), absl::StrCat("rank ", rank, ": ", status.message())));
    return 0;
  });
  for (int rank = 0; rank < ranks; ++rank) {
    const int code = codes[static_cast<size_t>(rank)];
    if (code != 0)
      return absl::InternalError(absl::StrCat("rank ", rank, " has ended with ", code));
  }
  return first->Get();
}

std::vector<std::string> LeftInSharedMemory() {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored)) {
    for (const int pid : forked) {
      if (entry.path().filename().string().starts_with(absl::StrCat("ebb-", pid, "-")))
        names.push_back(entry.path());
    }
  }
  return names;
}

}  // namespace ebb::testing
