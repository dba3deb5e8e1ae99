#include <liburing.h>

#include <cerrno>
#include <optional>

#include "absl/strings/str_cat.h"
#include "raw_disk.h"

namespace ebb::bench {
namespace {

class Uring final : public RawDisk {
 public:
  explicit Uring(const RawDiskOptions& options) : options_(options) {}
  ~Uring() override {
    if (made_) io_uring_queue_exit(&ring_);
  }

  bool Make() {
    // A kernel before 6.1 takes no flags.
    made_ = io_uring_queue_init(static_cast<unsigned>(options_.depth), &ring_,
                                IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN) == 0 ||
            io_uring_queue_init(static_cast<unsigned>(options_.depth), &ring_, 0) == 0;
    if (!made_) return false;
    // Some seccomp profiles allow rings, but no requests.
    io_uring_prep_nop(io_uring_get_sqe(&ring_));
    if (io_uring_submit_and_wait(&ring_, 1) < 0) return false;
    io_uring_cq_advance(&ring_, 1);
    const iovec memory = {options_.memory.data(), options_.memory.size()};
    registered_ = io_uring_register_buffers(&ring_, &memory, 1) == 0;
    return true;
  }

  absl::Status Move(int64_t read, int64_t written) override {
    RawRequests requests(options_, read, written);
    int in_flight = 0;
    const auto start = [&](uint64_t slot) {
      const std::optional<RawRequest> request = requests.Next();
      if (!request.has_value()) return;
      std::byte* const data =
          options_.memory.data() + static_cast<int64_t>(slot) * options_.block_bytes;
      io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
      const auto size = static_cast<unsigned>(request->bytes);
      const RawPlace place = PlaceOf(options_, request->at);
      const int file = place.file;
      const auto offset = static_cast<uint64_t>(place.offset);
      if (registered_) {
        request->write ? io_uring_prep_write_fixed(sqe, file, data, size, offset, 0)
                       : io_uring_prep_read_fixed(sqe, file, data, size, offset, 0);
      } else {
        request->write ? io_uring_prep_write(sqe, file, data, size, offset)
                       : io_uring_prep_read(sqe, file, data, size, offset);
      }
      io_uring_sqe_set_data64(sqe, slot);
      ++in_flight;
    };
    for (int slot = 0; slot < options_.depth; ++slot) start(static_cast<uint64_t>(slot));
    while (in_flight > 0) {
      const int entered = io_uring_submit_and_wait(&ring_, 1);
      if (entered < 0 && entered != -EINTR) return Failed(entered);
      io_uring_cqe* cqe = nullptr;
      while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
        const int result = cqe->res;
        const uint64_t slot = io_uring_cqe_get_data64(cqe);
        io_uring_cqe_seen(&ring_, cqe);
        --in_flight;
        if (result <= 0) return Failed(result);
        start(slot);
      }
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status Failed(int result) {
    return absl::InternalError(absl::StrCat("the bare io_uring loop failed with ", result));
  }

  const RawDiskOptions options_;
  io_uring ring_ = {};
  bool made_ = false;
  bool registered_ = false;
};

}  // namespace

std::unique_ptr<RawDisk> RawUring(const RawDiskOptions& options) {
  auto disk = std::make_unique<Uring>(options);
  if (!disk->Make()) return nullptr;
  return disk;
}

}  // namespace ebb::bench
