#include <sys/uio.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/thread_limit.h"
#include "raw_disk.h"

namespace ebb::bench {
namespace {

class Threads final : public RawDisk {
 public:
  explicit Threads(const RawDiskOptions& options) : options_(options) {}

  // Each thread takes the next block, so together they stream through the files.
  absl::Status Move(int64_t read, int64_t written) override {
    std::mutex mutex;
    RawRequests requests(options_, read, written);
    const auto take = [&] {
      const std::lock_guard<std::mutex> lock(mutex);
      return requests.Next();
    };
    std::atomic<int> error{0};
    std::vector<std::thread> running;
    absl::Status started;
    const auto start = [&](auto body) {
      try {
        running.emplace_back(std::move(body));
      } catch (const std::system_error& why) {
        started = NoThread("cannot start a thread of bare reads and writes", why,
                           "lower --queue-depth, ");
      }
    };
    for (int i = 0; i < options_.depth && started.ok(); ++i) {
      start([&, data = options_.memory.data() + i * options_.block_bytes] {
        while (const std::optional<RawRequest> request = take()) {
          const iovec part = {data, static_cast<size_t>(request->bytes)};
          const RawPlace place = PlaceOf(options_, request->at);
          const ssize_t moved = request->write ? pwritev(place.file, &part, 1, place.offset)
                                               : preadv(place.file, &part, 1, place.offset);
          if (moved <= 0) error.store(moved == 0 ? EIO : errno);
        }
      });
    }
    for (std::thread& thread : running) thread.join();
    if (!started.ok()) return started;
    if (error.load() == 0) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("bare reads and writes failed: ", std::strerror(error.load())));
  }

 private:
  const RawDiskOptions options_;
};

}  // namespace

std::unique_ptr<RawDisk> RawThreads(const RawDiskOptions& options) {
  return std::make_unique<Threads>(options);
}

}  // namespace ebb::bench
