// The end of an error where the system grants no thread.
#pragma once

namespace ebb {

inline constexpr char kRaiseThreadLimit[] =
    "raise the limit of processes and threads (ulimit -u, pids of the container) or run fewer "
    "ranks on this host";

}  // namespace ebb
