#include "ebb/runtime/device/device.h"

int main() {
  const ebb::Device device = ebb::Device::Cpu(/*threads=*/1);
  return device.kind() == ebb::DeviceKind::kCpu && device.Allocate(64, "a test").ok() ? 0 : 1;
}
