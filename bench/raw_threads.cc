#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "raw_disk.h"

namespace ebb::bench {
namespace {

constexpr int kThreads = 8;
constexpr int64_t kRequestBytes = int64_t{4} << 20;

class Threads final : public RawDisk {
 public:
  explicit Threads(const RawDiskOptions& options) : options_(options) {}

  // Each thread takes the next piece of the file: together they stream through it.
  absl::Status Pass(bool write) override {
    const int64_t memory = static_cast<int64_t>(options_.memory.size());
    const int threads = static_cast<int>(std::clamp<int64_t>(memory / kRequestBytes, 1, kThreads));
    const int64_t piece = std::min(kRequestBytes, memory);
    std::atomic<int64_t> next{0};
    std::atomic<int> error{0};
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) {
      running.emplace_back([&, data = options_.memory.data() + i * piece] {
        for (int64_t at; (at = next.fetch_add(piece)) < options_.bytes;) {
          const iovec part = {data, static_cast<size_t>(std::min(piece, options_.bytes - at))};
          const ssize_t moved =
              write ? pwritev(options_.file, &part, 1, at) : preadv(options_.file, &part, 1, at);
          if (moved <= 0) error.store(moved == 0 ? EIO : errno);
        }
      });
    }
    for (std::thread& thread : running) thread.join();
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
