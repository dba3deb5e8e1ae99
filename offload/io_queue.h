// The interface of a backend (io_uring, threads) for the disk. A request is at most one block of
// one file. The caller owns it, so submitting allocates nothing.
//
//   Submit(requests) -> [the system, in any order] -> IoListener::Completed(results), Announce()
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace ebb {

struct IoRequest {
  bool write = false;
  int file = 0;  // index among the queue's files
  int64_t offset = 0;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  IoRequest* next = nullptr;  // used by the queue while it has the request
};

struct IoCompletion {
  IoRequest* request = nullptr;
  int64_t result = 0;  // bytes moved, possibly fewer than requested, or -errno
};

class IoListener {
 public:
  // Called on a thread of the queue, or on the thread that drives it; may submit again.
  virtual void Completed(std::span<const IoCompletion> completions) = 0;
  // Called on the same thread when the system has the requests that Completed submitted. Only now
  // are waiting threads woken, because a woken thread may take the processor from this one, and the
  // disk would be idle.
  virtual void Announce() = 0;

 protected:
  ~IoListener() = default;
};

class IoQueue {
 public:
  // Called after the last completion, while no Submit runs.
  virtual ~IoQueue() = default;
  // Any thread, several at once. Does not wait for the disk.
  virtual void Submit(std::span<IoRequest* const> requests) = 0;
  // For a queue without a thread (IoQueueOptions::own_thread) with a request in flight: waits until
  // some requests are over, and tells the listener. False: the queue has threads, which do it.
  virtual bool Drive() { return false; }
  virtual std::string description() const = 0;
};

struct IoQueueOptions {
  std::span<const int> files;                    // open descriptors, borrowed
  std::span<const std::span<std::byte>> memory;  // registered with the ring if possible
  int depth = 32;                                // most requests in flight
  int threads = 1;                               // of the thread backend, at least
  bool single_submit = false;                    // one system call for each request
  // False: the thread that waits for a request drives the ring (Drive), so that no thread has to be
  // woken. The submitting thread drives until all its requests are over; then another thread may
  // submit. The reasons: the kernel cancels the requests of a thread that exits, and a request that
  // needs its thread does not end while another thread waits. The thread backend keeps its threads.
  bool own_thread = true;
  int ring_entries = 0;  // of the submission queue; 0: same as depth; not 0 only in tests
};

// kUnavailable: this machine or this build has no io_uring; the message says why.
// kResourceExhausted, for both: the system grants no thread.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(const IoQueueOptions& options,
                                                        IoListener& listener);
absl::StatusOr<std::unique_ptr<IoQueue>> MakeThreadQueue(const IoQueueOptions& options,
                                                         IoListener& listener);

// A thread of a backend. Tools that look at the process show `name`. kResourceExhausted: the system
// grants no thread.
absl::StatusOr<std::thread> StartIoThread(const char* name, std::function<void()> body);

// Requests in the order of their arrival, linked through `next`.
class IoRequestList {
 public:
  bool empty() const { return first_ == nullptr; }
  void Push(IoRequest& request) {
    request.next = nullptr;
    (first_ == nullptr ? first_ : last_->next) = &request;
    last_ = &request;
  }
  IoRequest& Pop() {
    IoRequest& request = *first_;
    first_ = request.next;
    return request;
  }

 private:
  IoRequest* first_ = nullptr;
  IoRequest* last_ = nullptr;
};

}  // namespace ebb
