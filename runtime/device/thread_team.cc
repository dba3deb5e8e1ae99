#include "ebb/runtime/device/thread_team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <deque>
#include <system_error>
#include <thread>

#include "ebb/runtime/device/wait_point.h"

namespace ebb {
namespace {

// The claimable parts, in one word: the run's number, its parts, and the next unclaimed part. A
// worker that wakes late finds a higher number or no part left. So a run never waits for a thread
// that has not started on it.
struct Claims {
  uint32_t run = 0;
  uint16_t parts = 0;
  uint16_t next = 0;
};
static_assert(std::atomic<Claims>::is_always_lock_free);

struct Worker {
  std::thread thread;
  std::atomic<int> core{-1};  // where its last parts began; -1: not known
};

}  // namespace

struct ThreadTeam::State {
  int threads = 1;
  int parts_per_thread = 1;
  std::deque<Worker> workers;
  cpu_set_t cores;  // of the thread that made the team
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

  // If cores are busy on the whole, Linux wakes a thread on the core where it last ran, or where
  // its waker runs, and looks for no idle one. There a worker runs when its caller has done all
  // parts: kernels take twice as long, in every run until something moves the worker to another
  // core.
  void LeaveCallersCore() {
    const int here = sched_getcpu();
    for (Worker& worker : workers) {
      if (here < 0 || worker.core.load(std::memory_order_relaxed) != here) continue;
      cpu_set_t others = cores;
      CPU_CLR(static_cast<size_t>(here), &others);
      if (CPU_COUNT(&others) == 0) continue;
      pthread_setaffinity_np(worker.thread.native_handle(), sizeof(others), &others);
      worker.core.store(-1, std::memory_order_relaxed);
    }
  }

  void Work(Worker& worker) {
    for (;;) {
      work.Await([&] { return HasWork() || stop.load(std::memory_order_acquire); },
                 WaitPoint::kNever, std::chrono::nanoseconds(0));
      if (stop.load(std::memory_order_acquire)) return;  // the team ends between runs
      worker.core.store(sched_getcpu(), std::memory_order_relaxed);
      RunParts();  // does nothing if the others have claimed all parts since
    }
  }
};

ThreadTeam::ThreadTeam(int threads, int parts_per_thread) : state_(std::make_unique<State>()) {
  assert(threads >= 1 && parts_per_thread >= 1 && threads <= UINT16_MAX / parts_per_thread);
  state_->parts_per_thread = parts_per_thread;
  CPU_ZERO(&state_->cores);
  sched_getaffinity(0, sizeof(state_->cores), &state_->cores);
  for (int i = 1; i < threads; ++i) {
    Worker& worker = state_->workers.emplace_back();
    try {
      worker.thread = std::thread([state = state_.get(), &worker] { state->Work(worker); });
    } catch (const std::system_error&) {
      state_->workers.pop_back();
      break;  // the system grants no more threads; fewer give the same bits
    }
    pthread_setname_np(worker.thread.native_handle(), "ebb-team");
  }
  state_->threads = 1 + static_cast<int>(state_->workers.size());
}

ThreadTeam::~ThreadTeam() {
  state_->stop.store(true, std::memory_order_release);
  state_->work.Notify();
  for (Worker& worker : state_->workers) worker.thread.join();
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
  state_->LeaveCallersCore();
  state_->work.Notify();
  state_->RunParts();
  state_->done.Await(
      [&] { return state_->parts_done.load(std::memory_order_acquire) == parts_used; });
  state_->busy.store(false, std::memory_order_release);
}

}  // namespace ebb
