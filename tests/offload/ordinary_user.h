// Turns root into an ordinary user, for tests of limits and permissions.
#pragma once

#include <sys/fsuid.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>

namespace ebb::testing {

inline constexpr uid_t kOrdinaryUser = 65534;  // named "nobody"

// The exit status of a process that becomes an ordinary user; 0: as expected.
enum OrdinaryUserExit {
  kAsExpected = 0,
  kNotAsExpected = 1,
  kCannotSetLimit = 2,
  kCannotBecomeOrdinary = 3,
};

// Changes the process for good, so it needs a separate process. A process that is not root's is an
// ordinary user's already. 0, or the errno with which the system refuses.
inline int BecomeOrdinaryUser() {
  return geteuid() != 0 || setuid(kOrdinaryUser) == 0 ? 0 : errno;
}

// Why BecomeOrdinaryUser would fail here; nothing: it would not. A user namespace with root alone,
// made by "unshare -r", has no other user, and a container may leave root without CAP_SETUID.
inline std::optional<std::string> WhyNotOrdinaryUser() {
  if (geteuid() != 0) return std::nullopt;
  const pid_t child = fork();
  if (child == 0) _exit(BecomeOrdinaryUser());
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
    return "no process to try to become an ordinary user in";
  if (WEXITSTATUS(status) == 0) return std::nullopt;
  return std::string("root cannot become an ordinary user here: ") +
         std::strerror(WEXITSTATUS(status));
}

// Only for the files that the calling thread of root's may reach. False: the system refuses.
inline bool ReachFilesAsOrdinaryUser() {
  setfsuid(kOrdinaryUser);
  return setfsuid(static_cast<uid_t>(-1)) == static_cast<int>(kOrdinaryUser);  // changes nothing
}

}  // namespace ebb::testing
