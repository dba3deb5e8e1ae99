// Requests for the disk: what a backend (io_uring, threads) must do. A request is at most one block
// of one file and is owned by the caller, so that submitting allocates nothing.
//
//   Submit(requests) -> [the system, in any order] -> IoListener::Completed(results), Announce()
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace ebb {

struct IoRequest {
  bool write = false;
  int file = 0;  // index among the queue's files
  int64_t offset = 0;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  IoRequest* next = nullptr;  // the queue's, while it has the request
};

struct IoCompletion {
  IoRequest* request = nullptr;
  int64_t result = 0;  // bytes moved, which may be less than asked for, or -errno
};

class IoListener {
 public:
  // On a thread of the queue, or on that which drives it; may submit again.
  virtual void Completed(std::span<const IoCompletion> completions) = 0;
  // On the same thread, when what Completed has submitted is with the system: now waiting threads may be
  // woken. A woken thread may take the processor from this one, and the disk would stand still
  // meanwhile.
  virtual void Announce() = 0;

 protected:
  ~IoListener() = default;
};

class IoQueue {
 public:
  // After the last completion; no Submit runs.
  virtual ~IoQueue() = default;
  // From any thread, any number at once. Does not wait for the disk.
  virtual void Submit(std::span<IoRequest* const> requests) = 0;
  // Of a queue without a thread (IoQueueOptions::own_thread): waits until some requests are over, of which there is
  // one at least, and tells the listener. False: the queue has threads, which do so.
  virtual bool Drive() { return false; }
  virtual std::string description() const = 0;
};

struct IoQueueOptions {
  std::span<const int> files;                    // open descriptors, borrowed
  std::span<const std::span<std::byte>> memory;  // registered with the ring where it may be
  int depth = 32;                                // requests that are in flight at most
  int threads = 1;                               // of the thread backend, at least
  bool single_submit = false;                    // one system call for each request
  // False: who waits for a request does the ring's work meanwhile (Drive), so that no thread has to be woken. Submit and
  // Drive are then called by one thread at a time. Threads that read and write are there all the same.
  bool own_thread = true;
  int ring_entries = 0;  // of the submission queue; 0: as deep, and else only in tests
};

// kUnavailable: this machine or this build has no io_uring, and why. Of both, kResourceExhausted: the
// system grants no thread.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(const IoQueueOptions& options,
                                                        IoListener& listener);
absl::StatusOr<std::unique_ptr<IoQueue>> MakeThreadQueue(const IoQueueOptions& options,
                                                         IoListener& listener);

// Requests in the order in which they came, linked through `next`.
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
