#include "ebb/offload/io_thread.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ebb {

absl::StatusOr<std::thread> StartIoThread(const char* name, std::function<void()> body) {
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "cannot start a thread to read and write the disk: ", error.what(),
        "; raise the limit of processes and threads (ulimit -u, pids of the container), lower "
        "aio.thread_count, or run fewer ranks on this host"));
  }
}

}  // namespace ebb
