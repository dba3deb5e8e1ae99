#include "ebb/runtime/device/thread_team.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <system_error>
#include <thread>
#include <vector>

#include "ebb/runtime/device/wait_point.h"

namespace ebb {
namespace {

// What can be claimed, in one word: the run's number, its parts, and the next unclaimed part. A
// worker that wakes late finds a higher number or no part left, so a run never waits for a thread
// that has not started on it.
struct Claims {
  uint32_t run = 0;
  uint16_t parts = 0;
  uint16_t next = 0;
};
static_assert(std::atomic<Claims>::is_always_lock_free);

}  // namespace

struct ThreadTeam::State {
  int threads = 1;
  int parts_per_thread = 1;
  std::vector<std::thread> workers;
  std::atomic<bool> busy{false};
  std::atomic<bool> stop{false};

  // The caller writes it before it publishes `claims`; threads that have claimed a part read it.
  const absl::FunctionRef<void(int64_t, int64_t)>* body = nullptr;
  int64_t count = 0;
  int64_t part_size = 0;

  std::atomic<Claims> claims{Claims{}};
  std::atomic<int> parts_done{0};
  WaitPoint work;
  WaitPoint done;

  bool HasWork() const {
    const Claims now = claims.load(std::memory_order_acquire);
    return now.next < now.parts;
  }

  // Takes parts of the published run until none is left.
  void RunParts() {
    Claims seen = claims.load(std::memory_order_acquire);
    while (seen.next < seen.parts) {
      Claims taken = seen;
      ++taken.next;
      if (!claims.compare_exchange_weak(seen, taken, std::memory_order_acq_rel)) continue;
      const int64_t begin = seen.next * part_size;
      (*body)(begin, std::min(count, begin + part_size));
      if (parts_done.fetch_add(1, std::memory_order_acq_rel) + 1 == seen.parts) done.Notify();
      seen = claims.load(std::memory_order_acquire);
    }
  }

  void Work() {
    for (;;) {
      work.Await([&] { return HasWork() || stop.load(std::memory_order_acquire); },
                 WaitPoint::kNever, std::chrono::nanoseconds(0));
      if (!HasWork()) return;
      RunParts();
    }
  }
};

ThreadTeam::ThreadTeam(int threads, int parts_per_thread) : state_(std::make_unique<State>()) {
  assert(threads >= 1 && parts_per_thread >= 1 && threads <= UINT16_MAX / parts_per_thread);
  state_->parts_per_thread = parts_per_thread;
  state_->workers.reserve(static_cast<size_t>(threads - 1));
  for (int i = 1; i < threads; ++i) {
    try {
      state_->workers.emplace_back([state = state_.get()] { state->Work(); });
    } catch (const std::system_error&) {
      break;  // the system grants no more threads; fewer give the same bits
    }
    pthread_setname_np(state_->workers.back().native_handle(), "ebb-team");
  }
  state_->threads = 1 + static_cast<int>(state_->workers.size());
}

ThreadTeam::~ThreadTeam() {
  state_->stop.store(true, std::memory_order_release);
  state_->work.Notify();
  for (std::thread& worker : state_->workers) worker.join();
}

int ThreadTeam::threads() const {
  return state_->threads;
}

void ThreadTeam::Run(int64_t count, int64_t grain,
                     absl::FunctionRef<void(int64_t begin, int64_t end)> body) {
  assert(grain >= 1);
  if (count <= 0) return;
  const int64_t grains = (count - 1) / grain + 1;
  const int64_t most = state_->threads == 1 ? 1 : state_->threads * state_->parts_per_thread;
  const int64_t parts = std::min<int64_t>(most, grains);
  if (parts <= 1 || state_->busy.exchange(true, std::memory_order_acquire)) {
    body(0, count);
    return;
  }
  state_->body = &body;
  state_->count = count;
  state_->part_size = ((grains - 1) / parts + 1) * grain;
  state_->parts_done.store(0, std::memory_order_relaxed);
  const int64_t parts_used = (count - 1) / state_->part_size + 1;
  const uint32_t run = state_->claims.load(std::memory_order_relaxed).run + 1;
  state_->claims.store({.run = run, .parts = static_cast<uint16_t>(parts_used)},
                       std::memory_order_release);
  state_->work.Notify();
  state_->RunParts();
  state_->done.Await(
      [&] { return state_->parts_done.load(std::memory_order_acquire) == parts_used; });
  state_->busy.store(false, std::memory_order_release);
}

}  // namespace ebb
