#include <barrier>

#include "../comm/backends.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb::testing {
namespace {

absl::Status RunOnOneGpu(int ranks, std::function<absl::Status(World)> body) {
  std::barrier all_there(ranks);
  return RunThreads(ranks, [&](World world) -> absl::Status {
    const absl::StatusOr<Device> device = Device::Cuda(0);
    absl::StatusOr<World> gpus = device.ok() ? world.On(*device) : device.status();
    // A body that fails the world does not fail the making of the world.
    all_there.arrive_and_wait();
    EBB_RETURN_IF_ERROR(gpus.status());
    return body(*std::move(gpus));
  });
}

}  // namespace

std::vector<Backend> Backends() {
  return {{.name = "cuda_local", .run = RunOnOneGpu, .many_ranks = 64, .device = [](int) {
             return *Device::Cuda(0);
           }}};
}

}  // namespace ebb::testing
