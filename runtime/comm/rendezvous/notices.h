// What the ranks of a world have reported of its communicators: failures, and ranks that have left.
// NCCL and MPI report neither, and a rank that makes more calls than a rank that has left waits in
// vain.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

// A rank that has left a communicator.
struct Departure {
  int rank = 0;        // in the communicator
  std::string name;    // for messages: "rank 1"
  uint64_t calls = 0;  // of all ranks together that it has made
  // Its calls with one peer each: peer, calls, peer, calls ...
  std::vector<uint64_t> exchanges = {};
};

// Of one communicator. Any thread.
class CommunicatorNotices {
 public:
  static constexpr uint64_t kStillHere = ~uint64_t{0};

  // The first failure stays. Neither waits nor calls CUDA.
  void Fail(const absl::Status& why);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  absl::Status failure() const;
  // Notified by a failure.
  WaitPoint& changed() { return changed_; }
  std::optional<Departure> FirstDeparture() const;
  // The calls that a rank has made in which the other one takes part; kStillHere until it leaves.
  uint64_t CallsOf(int rank, int other) const;

 private:
  friend class Notices;
  // Returns how many have left.
  int Depart(Departure departure);

  mutable std::mutex mutex_;
  absl::Status failure_;
  std::vector<Departure> departures_;
  std::atomic<bool> failed_{false}, has_departures_{false};
  WaitPoint changed_;
};

// Of all communicators that one rank knows of, by name; no two share one. A notice about a
// communicator that does not exist yet, or that this rank has left, is kept until all of its ranks
// have left it. Any thread.
class Notices {
 public:
  std::shared_ptr<CommunicatorNotices> Of(const std::string& name);
  // A rank leaves a communicator of `size` ranks.
  void Depart(const std::string& name, int size, Departure departure);
  // The world has failed: all communicators fail, also later ones and those that all have left.
  void FailAll(const absl::Status& why);
  // How many communicators have notices here.
  size_t known();

 private:
  std::mutex mutex_;
  absl::Status failure_;
  std::map<std::string, std::shared_ptr<CommunicatorNotices>> known_;
  std::vector<std::weak_ptr<CommunicatorNotices>> left_by_all_;
};

}  // namespace ebb
