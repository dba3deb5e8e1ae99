#include "backends.h"

#include "processes.h"

namespace ebb::testing {

std::vector<Backend> Backends() {
  return {{.name = "local", .run = RunThreads, .many_ranks = 64},
          {.name = "node", .run = RunProcesses, .many_ranks = 16, .names_hosts = true}};
}

}  // namespace ebb::testing
