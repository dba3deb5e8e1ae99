#include "../comm/backends.h"
#include "thread_ranks.h"

namespace ebb::testing {

std::vector<Backend> Backends() {
  const Backend plain = {.name = "nccl",
                         .run = RunOnGpu,
                         .many_ranks = 16,
                         .device = [](int) { return *Device::Cuda(0); },
                         .exact_order = false};
  Backend in_order = plain;
  in_order.name = "nccl_in_order";
  in_order.exact_order = true;
  in_order.sum_scratch = 1024;  // operations of several pieces, and spans in one piece
  return {plain, in_order};
}

}  // namespace ebb::testing
