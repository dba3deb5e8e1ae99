#include "ebb/runtime/trace/standard_streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace ebb {

void OpenMissingStandardStreams() {
  // In this order, because open takes the lowest free descriptor.
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (fcntl(stream, F_GETFD) >= 0 || errno != EBADF) continue;
    if (open("/dev/null", O_RDWR) < 0) open("/", O_PATH);
  }
}

int AboveStandardStreams(int descriptor) {
  if (descriptor < STDIN_FILENO || descriptor > STDERR_FILENO) return descriptor;
  const int above = fcntl(descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  close(descriptor);
  errno = error;
  return above;
}

}  // namespace ebb
