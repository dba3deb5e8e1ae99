#include "ebb/runtime/comm/world.h"

int main() {
  const absl::Status status =
      ebb::RunThreads(2, [](ebb::World world) { return world.NewCommunicator().status(); });
  return status.ok() ? 0 : 1;
}
