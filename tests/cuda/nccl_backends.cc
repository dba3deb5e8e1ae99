#include "../comm/backends.h"
#include "thread_ranks.h"

namespace ebb::testing {

std::vector<Backend> Backends() {
  return {{.name = "nccl",
           .run = RunOnGpus,
           .many_ranks = 16,
           .device = [](int) { return *Device::Cuda(0); },
           .exact_order = false}};
}

}  // namespace ebb::testing
