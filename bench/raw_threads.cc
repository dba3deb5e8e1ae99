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

class Threads final : public RawDisk {
 public:
  explicit Threads(const RawDiskOptions& options) : options_(options) {}

  // Each thread takes the next block: together they stream through the files.
  absl::Status Pass(bool write) override {
    const int64_t piece = options_.block_bytes;
    std::atomic<int64_t> next{0};
    std::atomic<int> error{0};
    std::vector<std::thread> running;
    for (int i = 0; i < options_.depth; ++i) {
      running.emplace_back([&, data = options_.memory.data() + i * piece] {
        for (int64_t at; (at = next.fetch_add(piece)) < options_.bytes;) {
          const iovec part = {data, static_cast<size_t>(std::min(piece, options_.bytes - at))};
          const RawPlace place = PlaceOf(options_, at);
          const ssize_t moved = write ? pwritev(place.file, &part, 1, place.offset)
                                      : preadv(place.file, &part, 1, place.offset);
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
