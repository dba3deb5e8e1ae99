// Ranks on GPUs as threads of the test program: they reach each other through memory, and NCCL, or
// its stand-in, connects them.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ebb/runtime/comm/nccl/bootstrap.h"
#include "ebb/runtime/comm/world.h"

namespace ebb::testing {

// What the ranks of a world share.
class ThreadMeeting {
 public:
  explicit ThreadMeeting(int size)
      : size_(size), listeners_(static_cast<size_t>(size)), notes_(static_cast<size_t>(size)) {}

  std::shared_ptr<Bootstrap> For(int rank);
  // The rank's process has ended, as far as the others can tell.
  void End(int rank);

 private:
  class Member;
  struct Round {
    std::map<int, std::string> texts;
  };

  absl::StatusOr<std::vector<std::string>> AllGather(int rank, std::string_view mine,
                                                     double timeout_seconds);
  void Fail(int rank, const absl::Status& why);
  void Listen(int rank, std::function<void(const absl::Status&)> heard);
  void PassOn(int rank, std::string_view note);

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Round> rounds_;
  std::map<int, int> joined_;  // rounds, by rank
  absl::Status failure_;
  std::vector<std::function<void(const absl::Status&)>> listeners_;
  std::vector<std::weak_ptr<FarewellNotes>> notes_;  // by rank
};

// As RunThreads, with NCCL and round `devices` CUDA devices. A rank whose body has failed has ended.
absl::Status RunOnGpus(int ranks, int devices, std::function<absl::Status(World)> body);
// All on the first one.
absl::Status RunOnGpu(int ranks, std::function<absl::Status(World)> body);

}  // namespace ebb::testing
