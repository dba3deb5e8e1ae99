// Ranks as processes, for tests: forked from the test program, so that a test's body runs on them
// as on threads. Data that ranks give each other or the test lies in Shared memory.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <functional>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/comm/shared/shared_status.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb::testing {

// Pages that all ranks of a test share. `construct` runs once, before any rank has them. Ranks are
// forked later, or (mpi_ranks.cc) each calls this in the same order.
void* MakeShared(size_t bytes, absl::FunctionRef<void(void* at)> construct);

// One object for all ranks of a test.
template <class T>
class Shared {
 public:
  static_assert(std::is_trivially_destructible_v<T>);
  template <class... Arguments>
  explicit Shared(Arguments&&... arguments)
      : object_(static_cast<T*>(MakeShared(
            sizeof(T), [&](void* at) { new (at) T(std::forward<Arguments>(arguments)...); }))) {}
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() { munmap(object_, sizeof(T)); }
  T& operator*() const { return *object_; }
  T* operator->() const { return object_; }

 private:
  T* const object_;
};

// A point that ranks wait for across operations.
class Signal {
 public:
  void Set() {
    state_->set.store(true);
    state_->point.Notify();
  }
  void Wait() const {
    state_->point.Await([&] { return state_->set.load(); });
  }

 private:
  struct State {
    std::atomic<bool> set{false};
    WaitPoint point{WaitPoint::Scope::kProcesses};
  };
  Shared<State> state_;
};

// A random number, the same for all ranks of a test.
uint64_t RandomSeed();

// Results of all ranks.
class Results {
 public:
  static constexpr int kRanksMax = 64;
  void Set(int rank, const absl::Status& status) { all_->each[rank].TrySet(status); }
  absl::Status Get(int rank) const { return all_->each[rank].Get(); }
  std::vector<absl::Status> Take(int ranks) const {
    std::vector<absl::Status> seen;
    for (int rank = 0; rank < ranks; ++rank) seen.push_back(Get(rank));
    return seen;
  }

 private:
  struct All {
    SharedStatus each[kRanksMax];
  };
  Shared<All> all_;
};

// A name at which ranks meet, and which no other test has.
std::string NewMeetingName();

// Forks `ranks` processes that run `body` and end without running exit handlers. Returns their exit
// codes by rank; minus the signal for a killed one. `started` gets the process ids before the first
// wait.
std::vector<int> Fork(int ranks, const std::function<int(int rank)>& body,
                      const std::function<void(const std::vector<int>& pids)>& started = {});

// RunThreads with a process for each rank.
absl::Status RunProcesses(int ranks, std::function<absl::Status(World)> body);

// The names in /dev/shm of the processes that this one has forked. Other tests run beside it.
std::vector<std::string> LeftInSharedMemory();

}  // namespace ebb::testing
