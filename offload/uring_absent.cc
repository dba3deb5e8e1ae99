// Replaces uring_queue.cc in a build without liburing.
#include "absl/status/status.h"
#include "ebb/offload/io_queue.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(const IoQueueOptions&, IoListener&) {
  return absl::UnavailableError("this build has no io_uring: liburing was not found");
}

}  // namespace ebb
