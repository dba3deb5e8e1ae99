// The ranks of one communicator of the stand-in: they meet, read each other's memory and meet
// again. A rank that aborts stops waiting at once. The others go on waiting, as in NCCL, until they
// abort too.
#pragma once

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "reduce.h"

namespace ebb::stand_in {

enum class PartKind { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kSend, kReceive };

// One call inside a group.
struct Part {
  PartKind kind = PartKind::kAllGather;
  const std::byte* send = nullptr;
  std::byte* receive = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  Combine combine = Combine::kSum;
  bool plain = true;  // no operator was made for it
  float scale = 1;    // of the inputs
  int peer = -1;      // or root
};

class Clique {
 public:
  explicit Clique(int size) : size_(size), published_(static_cast<size_t>(size)) {}

  int size() const { return size_; }
  void Join() { ++joined_; }
  bool complete() const { return joined_ == size_; }
  // True for the last one.
  bool Leave() { return ++left_ == size_; }

  // All ranks together register windows, one after the other. By one thread at a time. False: a
  // rank before gave another size.
  bool JoinWindow(int window, size_t bytes) {
    Window& joined = windows_[window];
    if (joined.ranks++ == 0) joined.bytes = bytes;
    return joined.bytes == bytes;
  }
  bool IsWindow(int window) { return windows_[window].ranks == size_; }

  // One rank's group, on its stream's thread. Returns early once `aborted` is set.
  void Run(int rank, const std::vector<Part>& parts, const std::atomic<bool>& aborted,
           std::vector<std::byte>& scratch);
  // Call it after a rank has set its `aborted`.
  void Abort();

 private:
  struct Window {
    int ranks = 0;  // that have come
    size_t bytes = 0;
  };
  struct Post {
    const Part* part = nullptr;
    bool taken = false;
  };
  using Lock = std::unique_lock<std::mutex>;

  bool Barrier(Lock& lock, const std::atomic<bool>& aborted);
  bool RunCollective(int rank, const Part& part, const std::atomic<bool>& aborted,
                     std::vector<std::byte>& scratch);
  bool AllTheSame() const;
  size_t Compute(int rank, const Part& part, std::vector<std::byte>& scratch) const;

  const int size_;
  std::atomic<int> joined_{0}, left_{0};
  std::map<int, Window> windows_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int here_ = 0;
  uint64_t barriers_ = 0;
  int readers_ = 0;
  bool broken_ = false;  // a rank has aborted
  std::vector<const Part*> published_;
  std::map<std::pair<int, int>, std::vector<Post*>> posts_;  // by sender and receiver
};

}  // namespace ebb::stand_in
