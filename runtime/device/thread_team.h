// The threads one kernel is spread over. A kernel cuts its elements into contiguous parts and
// computes each element alone, so the number of threads never shows in the bits.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace ebb {

class ThreadTeam {
 public:
  // `threads` in all: the caller of Run and threads - 1 workers, which sleep between runs. With
  // several parts for each thread, a slow thread takes fewer of them.
  explicit ThreadTeam(int threads, int parts_per_thread = 1);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int threads() const;

  // Calls body(begin, end) for contiguous parts of [0, count), each a multiple of `grain` except
  // the last, at most `parts_per_thread` for each thread. Returns when all parts are done.
  // Allocates nothing. While one caller's run uses the workers, a caller on another stream runs its
  // whole body itself.
  void Run(int64_t count, int64_t grain, absl::FunctionRef<void(int64_t begin, int64_t end)> body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ebb
