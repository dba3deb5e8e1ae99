// The threads one kernel is spread over. A kernel cuts its elements into contiguous parts and every
// element's arithmetic is its own, so the number of threads never shows in the bits.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace ebb {

class ThreadTeam {
 public:
  // `threads` in all: the caller of Run and threads - 1 workers, which sleep between runs. Of several
  // parts a thread, a thread that is slower than the others takes fewer.
  explicit ThreadTeam(int threads, int parts_per_thread = 1);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int threads() const;

  // Calls body(begin, end) for contiguous parts of [0, count), each a multiple of `grain` but the
  // last, at most `parts_per_thread` a thread, and returns when all have. Allocates nothing. Callers of different
  // streams take turns: while one runs on the workers, another runs its whole body itself.
  void Run(int64_t count, int64_t grain, absl::FunctionRef<void(int64_t begin, int64_t end)> body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ebb
