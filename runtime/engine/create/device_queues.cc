#include "ebb/runtime/engine/create/device_queues.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ebb {
namespace {

constexpr int kQueuesByDefault = 8, kQueuesMax = 32;  // of CUDA

}  // namespace

std::string WarnOfFewQueues(int streams, const char* connections) {
  int queues = 0;
  const bool given = connections != nullptr && absl::SimpleAtoi(connections, &queues) && queues > 0;
  if (!given) queues = kQueuesByDefault;
  if (queues >= streams) return "";
  return absl::StrCat("CUDA_DEVICE_MAX_CONNECTIONS is ", given ? connections : "not set",
                      ", so the ", streams, " streams of this engine share ", queues,
                      queues == 1 ? " queue" : " queues",
                      " of the device and wait for each other: set it to ", kQueuesMax,
                      " where the ranks are launched");
}

}  // namespace ebb
