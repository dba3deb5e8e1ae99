// The disk through pread and pwrite on a few threads, if io_uring cannot be used.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/offload/io_queue.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

// Each thread has one request in flight; with fewer threads a disk is idle between two requests.
constexpr int kThreadsMin = 4;

class ThreadQueue final : public IoQueue {
 public:
  static absl::StatusOr<std::unique_ptr<IoQueue>> Create(const IoQueueOptions& options,
                                                         IoListener& listener) {
    std::unique_ptr<ThreadQueue> queue(new ThreadQueue(options, listener));
    const int threads = std::min(std::max(options.threads, kThreadsMin), options.depth);
    for (int i = 0; i < threads; ++i) {
      EBB_ASSIGN_OR_RETURN(std::thread thread,
                           StartIoThread("ebb-io", [q = queue.get()] { q->Run(); }));
      queue->threads_.push_back(std::move(thread));
    }
    return queue;
  }

  ~ThreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void Submit(std::span<IoRequest* const> requests) override {
    {
      const std::lock_guard lock(mutex_);
      for (IoRequest* request : requests) submitted_.Push(*request);
    }
    requests.size() == 1 ? changed_.notify_one() : changed_.notify_all();
  }

  std::string description() const override {
    return absl::StrCat(threads_.size(), threads_.size() == 1 ? " thread" : " threads");
  }

 private:
  ThreadQueue(const IoQueueOptions& options, IoListener& listener)
      : listener_(listener), files_(options.files.begin(), options.files.end()) {}

  void Run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !submitted_.empty(); });
      if (submitted_.empty()) return;
      IoRequest& request = submitted_.Pop();
      lock.unlock();
      const IoCompletion completion = {&request, Do(request)};
      listener_.Completed({&completion, 1});
      listener_.Announce();
      lock.lock();
    }
  }

  int64_t Do(const IoRequest& request) const {
    const int file = files_[request.file];
    const auto bytes = static_cast<size_t>(request.bytes);
    const ssize_t moved = request.write ? pwrite(file, request.data, bytes, request.offset)
                                        : pread(file, request.data, bytes, request.offset);
    return moved >= 0 ? moved : -errno;
  }

  IoListener& listener_;
  const std::vector<int> files_;
  std::mutex mutex_;
  std::condition_variable changed_;
  IoRequestList submitted_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeThreadQueue(const IoQueueOptions& options,
                                                         IoListener& listener) {
  return ThreadQueue::Create(options, listener);
}

absl::StatusOr<std::thread> StartIoThread(const char* name, std::function<void()> body) {
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {
    return NoThread("cannot start a thread to read and write the disk", error,
                    "lower aio.thread_count, ");
  }
}

}  // namespace ebb
