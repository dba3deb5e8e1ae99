// The disk through io_uring. One thread owns the ring, and only this thread submits and reaps. So
// the rings need no lock, the kernel's completion work interrupts no compute thread, and a thread
// that has started transfers may end. Other threads hand their requests to this thread, and wake it
// through an eventfd that the ring itself reads. A queue without a thread does the same in Submit
// and Drive:
//
//   Submit -> added_ -> [Fill: SQEs] -> one system call: submit, wait -> [Reap: CQEs] -> Completed
//
// After completions the ring is filled and submitted before Announce wakes any thread.
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/io_error.h"
#include "ebb/offload/io_queue.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

constexpr int kRingEntriesMax = 4096;
constexpr size_t kRegisteredBytesMax = size_t{1} << 30;  // of one buffer: the kernel's limit
constexpr size_t kCompletionsMax = 64;                   // of one Completed

// Held while a ring is made or freed. liburing maps and unmaps rings by system calls that the
// thread sanitizer does not see. Without this mutex, a new ring at an old ring's address would look
// like a race to it.
std::mutex rings_mutex;

// Whether the kernel may succeed later.
bool Passing(int error) {
  return error == -EBUSY || MayBeTakenLater(-error);
}

// The kernel counts rings and registered buffers as locked memory. Only this error shows that the
// limit is reached.
std::string RaiseLockedMemoryAfter(int error) {
  return error == -ENOMEM ? absl::StrCat(". ", kRaiseLockedMemory) : "";
}

class UringQueue final : public IoQueue {
 public:
  static absl::StatusOr<std::unique_ptr<IoQueue>> Create(const IoQueueOptions& options,
                                                         IoListener& listener) {
    std::unique_ptr<UringQueue> queue(new UringQueue(options, listener));
    queue->wake_fd_ = FileHandle(eventfd(0, EFD_CLOEXEC));
    if (!queue->wake_fd_.is_open()) {
      return absl::UnavailableError(
          absl::StrCat("no eventfd for io_uring: ", std::strerror(errno)));
    }
    std::promise<absl::Status> set_up;
    if (!options.own_thread) {
      EBB_RETURN_IF_ERROR(queue->SetUp(options));
      return queue;
    }
    EBB_ASSIGN_OR_RETURN(queue->thread_,
                         StartIoThread("ebb-io-uring", [q = queue.get(), &options, &set_up] {
                           const absl::Status status = q->SetUp(options);
                           set_up.set_value(status);
                           if (status.ok()) q->Run();
                         }));
    EBB_RETURN_IF_ERROR(set_up.get_future().get());
    return queue;
  }

  ~UringQueue() override {
    if (thread_.joinable()) {
      {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
      }
      Wake();
      thread_.join();
    }
    if (ring_made_) {
      const std::lock_guard lock(rings_mutex);
      io_uring_queue_exit(&ring_);
    }
  }

  void Submit(std::span<IoRequest* const> requests) override {
    if (!own_thread_) {
      CheckDriver();
      for (IoRequest* request : requests) waiting_.Push(*request);
      if (std::exchange(driven_, true))
        return;  // from Completed: the caller of that hands them over
      Fill();
      Enter(0);
      driven_ = false;
      return;
    }
    bool wake = false;
    {
      const std::lock_guard lock(mutex_);
      for (IoRequest* request : requests) added_.Push(*request);
      wake = std::exchange(asleep_, false);
    }
    if (wake) Wake();
  }

  bool Drive() override {
    if (own_thread_) return false;
    CheckDriver();
    driven_ = true;
    Fill();
    Enter(unannounced_ ? 0 : 1);
    Reap();
    if (std::exchange(unannounced_, false)) {
      Fill();
      Enter(0);
      listener_.Announce();
    }
    driven_ = false;
    return true;
  }

  std::string description() const override {
    return buffers_.empty() ? "io_uring" : "io_uring, registered buffers";
  }

 private:
  UringQueue(const IoQueueOptions& options, IoListener& listener)
      : listener_(listener),
        files_(options.files.begin(), options.files.end()),
        single_submit_(options.single_submit),
        own_thread_(options.own_thread) {}

  // IoQueueOptions::own_thread
  void CheckDriver() {
    const std::thread::id caller = std::this_thread::get_id();
    assert(driver_ == caller || (in_flight_ == 0 && waiting_.empty()));
    driver_ = caller;
  }

  // Runs on the thread that owns the ring, so the kernel may treat it as the only submitter.
  absl::Status SetUp(const IoQueueOptions& options) {
    const int entries = options.ring_entries > 0
                            ? options.ring_entries
                            : std::min(options.depth + 1, kRingEntriesMax);  // + 1: the eventfd
    int error = MakeRing(static_cast<unsigned>(entries));
    ring_made_ = error >= 0;
    if (ring_made_) error = TryRequest();
    if (error < 0) {
      const bool forbidden = error == -EPERM || error == -EACCES;
      return absl::UnavailableError(absl::StrCat(
          "io_uring is not available: ", std::strerror(-error),
          forbidden ? " (a container's seccomp profile, or kernel.io_uring_disabled)" : "",
          RaiseLockedMemoryAfter(error)));
    }
    Register(options.memory);
    return absl::OkStatus();
  }

  int MakeRing(unsigned entries) {
    const std::lock_guard lock(rings_mutex);
    // A ring without a thread may be driven by different threads.
    const unsigned flags = own_thread_ ? IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN
                                       : IORING_SETUP_COOP_TASKRUN;
    const int error = io_uring_queue_init(entries, &ring_, flags);
    if (error != -EINVAL) return error;
    return io_uring_queue_init(entries, &ring_, 0);  // for Linux before 6.1
  }

  // Tries one request: the read that waits for wakes, after one wake. A security profile may grant
  // rings and refuse submissions, and kernels before 5.6 lack our requests. 0, or -errno.
  int TryRequest() {
    Wake();
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_read(sqe, wake_fd_.get(), &wakes_, sizeof(wakes_), 0);
    io_uring_sqe_set_data(sqe, nullptr);
    io_uring_cqe* cqe = nullptr;
    while (broken_ == 0 && io_uring_peek_cqe(&ring_, &cqe) != 0) Enter(1);
    if (broken_ != 0) return broken_;
    const int result = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    return std::min(result, 0);
  }

  // Registers files and memory. Both save the kernel work with every request, but are optional.
  void Register(std::span<const std::span<std::byte>> memory) {
    files_registered_ =
        io_uring_register_files(&ring_, files_.data(), static_cast<unsigned>(files_.size())) == 0;
    int64_t bytes = 0;
    for (const std::span<std::byte> span : memory) {
      AddBuffers(span);
      bytes += static_cast<int64_t>(span.size());
    }
    if (buffers_.empty()) return;
    std::sort(buffers_.begin(), buffers_.end(),
              [](const iovec& a, const iovec& b) { return a.iov_base < b.iov_base; });
    const int error =
        io_uring_register_buffers(&ring_, buffers_.data(), static_cast<unsigned>(buffers_.size()));
    if (error == 0) return;
    buffers_.clear();
    static std::once_flag said;
    std::call_once(said, [&] {
      LogWarning(absl::StrCat("io_uring cannot register ", (bytes + 1023) >> 10,
                              " KiB of buffers: ", std::strerror(-error),
                              ". Transfers work without, but take some more CPU time",
                              RaiseLockedMemoryAfter(error)));
    });
  }

  // Linux 6.12 and later see a buffer as few large pieces if all its pages are huge, otherwise as
  // many small ones, for which the block layer cuts a request of 1 MiB (virtio: 254 pieces). So the
  // end of a span that fills no huge page is a buffer of its own.
  void AddBuffers(std::span<std::byte> span) {
    constexpr auto kHuge = static_cast<size_t>(kHugePageBytes);
    const size_t huge = span.size() / kHuge * kHuge;
    for (std::span<std::byte> part : {span.first(huge), span.subspan(huge)}) {
      while (!part.empty()) {
        const size_t bytes = std::min(part.size(), kRegisteredBytesMax);
        buffers_.push_back({part.data(), bytes});
        part = part.subspan(bytes);
      }
    }
  }

  void Wake() {
    const uint64_t one = 1;
    while (write(wake_fd_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  void Run() {
    while (Take()) {
      Fill();
      if (std::exchange(unannounced_, false)) {
        Enter(0);
        listener_.Announce();
        continue;
      }
      Enter(1);
      {
        const std::lock_guard lock(mutex_);
        asleep_ = false;
      }
      Reap();
    }
  }

  // Moves new requests into waiting_. False: the queue is closing.
  bool Take() {
    const std::lock_guard lock(mutex_);
    while (!added_.empty()) waiting_.Push(added_.Pop());
    if (stopping_ && waiting_.empty() && in_flight_ == 0 && !unannounced_ &&
        (!listening_ || broken_ != 0)) {
      return false;
    }
    stop_seen_ = stopping_;
    asleep_ = !unannounced_;
    return true;
  }

  void Fill() {
    if (own_thread_ && !listening_ && !stop_seen_) {
      if (io_uring_sqe* const sqe = NextEntry()) {
        io_uring_prep_read(sqe, wake_fd_.get(), &wakes_, sizeof(wakes_), 0);
        io_uring_sqe_set_data(sqe, nullptr);
        listening_ = true;
      }
    }
    // Only as many requests are in flight as have room for completions. The others wait here.
    while (!waiting_.empty() && in_flight_ < *ring_.cq.kring_entries - 1) {
      io_uring_sqe* const sqe = NextEntry();
      if (sqe == nullptr) return;
      Prepare(sqe, waiting_.Pop());
      ++in_flight_;
      if (single_submit_) Enter(0);
    }
  }

  // Null: the submission queue is full, and the kernel takes nothing now.
  io_uring_sqe* NextEntry() {
    if (io_uring_sqe* const sqe = io_uring_get_sqe(&ring_)) return sqe;
    Enter(0);
    return io_uring_get_sqe(&ring_);
  }

  void Prepare(io_uring_sqe* sqe, IoRequest& request) {
    const auto index = static_cast<size_t>(request.file);
    const int file = files_registered_ ? request.file : files_[index];
    const auto bytes = static_cast<unsigned>(request.bytes);
    const auto offset = static_cast<uint64_t>(request.offset);
    const int buffer = BufferOf(request);
    if (buffer >= 0) {
      request.write ? io_uring_prep_write_fixed(sqe, file, request.data, bytes, offset, buffer)
                    : io_uring_prep_read_fixed(sqe, file, request.data, bytes, offset, buffer);
    } else {
      request.write ? io_uring_prep_write(sqe, file, request.data, bytes, offset)
                    : io_uring_prep_read(sqe, file, request.data, bytes, offset);
    }
    if (files_registered_) sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, &request);
  }

  // The registered buffer that holds the request's memory, or -1.
  int BufferOf(const IoRequest& request) const {
    auto after = std::upper_bound(
        buffers_.begin(), buffers_.end(), request.data,
        [](const std::byte* data, const iovec& buffer) { return data < buffer.iov_base; });
    if (after == buffers_.begin()) return -1;
    const iovec& buffer = *--after;
    const auto begin = static_cast<size_t>(request.data - static_cast<std::byte*>(buffer.iov_base));
    if (begin + static_cast<size_t>(request.bytes) > buffer.iov_len) return -1;
    return static_cast<int>(after - buffers_.begin());
  }

  // Submits the prepared requests and waits for `completions`.
  void Enter(unsigned completions) {
    if (broken_ == 0) {
      const bool submits = io_uring_sq_ready(&ring_) > 0;
      const int result = io_uring_submit_and_wait(&ring_, completions);
      if (result >= 0) {
        refusals_.Moved();
        return;  // no progress yet: this may have been the read of the eventfd
      }
      // Signals may end a wait for the disk, any number of times: a submitted request stays with
      // the disk until it answers. Requests that are not submitted have been refused.
      const bool interrupts_wait = result == -EINTR && !submits;
      if (!Passing(result)) {
        broken_ = result;
      } else if (!interrupts_wait && io_uring_cq_ready(&ring_) == 0) {
        AfterRefusal(result);
      }
    }
    if (broken_ != 0) FailPrepared();
  }

  // The kernel is short of memory. Requests in flight give some back. If there are none, a pause
  // may help.
  void AfterRefusal(int error) {
    if (refusals_.Refused()) {
      broken_ = error;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // The kernel takes no more requests, so those that it has not taken have failed.
  void FailPrepared() {
    for (unsigned head = *ring_.sq.khead; head != ring_.sq.sqe_tail; ++head) {
      const io_uring_sqe& sqe = ring_.sq.sqes[head & *ring_.sq.kring_mask];
      auto* const request = reinterpret_cast<IoRequest*>(sqe.user_data);
      if (request != nullptr) Complete(*request, broken_);
    }
    ring_.sq.sqe_tail = *ring_.sq.khead;
    ring_.sq.sqe_head = *ring_.sq.khead;
    io_uring_cqe* cqe = nullptr;
    if (in_flight_ == 0 || io_uring_wait_cqe(&ring_, &cqe) != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void Complete(IoRequest& request, int64_t result) {
    --in_flight_;
    const IoCompletion completion = {&request, result};
    unannounced_ = true;
    listener_.Completed({&completion, 1});
  }

  void Reap() {
    std::array<IoCompletion, kCompletionsMax> completions;
    size_t count = 0;
    io_uring_cqe* cqe = nullptr;
    while (count < kCompletionsMax && io_uring_peek_cqe(&ring_, &cqe) == 0) {
      if (auto* const request = static_cast<IoRequest*>(io_uring_cqe_get_data(cqe))) {
        completions[count++] = {request, cqe->res};
      } else {
        listening_ = false;
      }
      io_uring_cqe_seen(&ring_, cqe);
    }
    in_flight_ -= static_cast<unsigned>(count);
    if (count == 0) return;
    unannounced_ = true;
    listener_.Completed({completions.data(), count});
  }

  IoListener& listener_;
  const std::vector<int> files_;
  const bool single_submit_;
  const bool own_thread_;
  bool files_registered_ = false;
  std::vector<iovec> buffers_;  // registered ones, by address
  io_uring ring_ = {};
  bool ring_made_ = false;
  FileHandle wake_fd_;

  std::mutex mutex_;
  IoRequestList added_;
  bool asleep_ = false;  // or about to sleep, so it must be woken
  bool stopping_ = false;

  // Used only by the ring's thread, or by the thread that drives the ring:
  IoRequestList waiting_;
  bool driven_ = false;
  std::thread::id driver_;
  unsigned in_flight_ = 0;
  bool listening_ = false;  // a read of the eventfd is under way
  bool stop_seen_ = false;
  bool unannounced_ = false;  // the listener has had completions since its last Announce
  Refusals refusals_;         // of submissions
  int broken_ = 0;            // -errno; after it the kernel takes no requests
  uint64_t wakes_ = 0;

  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(const IoQueueOptions& options,
                                                        IoListener& listener) {
  return UringQueue::Create(options, listener);
}

}  // namespace ebb
