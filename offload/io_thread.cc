#include "ebb/offload/io_thread.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "ebb/runtime/device/thread_limit.h"

namespace ebb {

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
