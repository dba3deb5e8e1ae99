// An in-order queue of work on a device. Move-only. The destructor waits for all enqueued work.
//
// Enqueue, Copy, Zero, Wait and Record return at once, allocate nothing and may be called by one
// thread at a time. A stream holds as many tasks as it was made for, kStreamTasksMax by default; an
// enqueuing thread waits while it is full. Tasks do not fail: work that can fail keeps its own
// sticky Status (Communicator, Engine); the device's own failures are status().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

#include "absl/status/status.h"
#include "ebb/runtime/device/event.h"

namespace ebb {

class ThreadTeam;
class StreamBackend;

// Names a stream to foreign code: a cudaStream_t on CUDA; null on the CPU, where the calling thread
// is the stream.
struct StreamView {
  void* native = nullptr;
};

inline constexpr size_t kTaskBytesMax = 112;
inline constexpr int kStreamTasksMax = 1024;

// A trivially copyable callable of at most kTaskBytesMax bytes, stored in place: enqueuing never
// allocates.
class Task {
 public:
  Task() = default;
  template <class F>
  explicit Task(F function)
      : run_([](const void* storage) { (*static_cast<const F*>(storage))(); }) {
    static_assert(sizeof(F) <= kTaskBytesMax && std::is_trivially_copyable_v<F> && alignof(F) <= 16,
                  "a task captures pointers and numbers; what they point to outlives it");
    ::new (static_cast<void*>(storage_)) F(function);
  }
  void operator()() const { run_(storage_); }

 private:
  void (*run_)(const void*) = nullptr;
  alignas(16) std::byte storage_[kTaskBytesMax] = {};
};

class Stream {
 public:
  explicit Stream(std::unique_ptr<StreamBackend> backend);
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  // Runs `function` after everything enqueued before. On CUDA it is a host function in stream
  // order, and may neither call CUDA nor wait for another stream, because one thread may run the
  // host functions of all streams. Work that waits belongs on host streams (Device::NewHostStream).
  template <class F>
  void Enqueue(F function) {
    Enqueue(Task(function));
  }
  void Enqueue(Task task);
  void Copy(void* destination, const void* source, int64_t bytes);
  void Zero(void* destination, int64_t bytes);
  // Work enqueued after this call runs after the most recent Record of `event` at the time of this
  // call; at once if there is none.
  void Wait(const Event& event);
  void Record(Event& event);
  // Blocks the caller until everything enqueued before has run.
  void WaitIdle();

  // Threads that kernels on this stream may use, the running one included.
  ThreadTeam& team() const;
  StreamView view() const;
  // The first failure of enqueued work, sticky: later work does nothing, but tasks still run.
  // Always OK on the CPU.
  absl::Status status() const;

  StreamBackend& backend() const { return *backend_; }

 private:
  std::unique_ptr<StreamBackend> backend_;
};

}  // namespace ebb
