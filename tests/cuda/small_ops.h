// gpt's ops on the stand-in's first device, as small as possible.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "ebb/runtime/device/device.h"
#include "ops/ops.h"

namespace ebb::gpt {

inline constexpr int64_t kRows = 4, kWidth = 8;
inline constexpr OpsLimits kLimits = {
    .rows = kRows, .tokens = kRows, .width = kWidth, .heads = 1, .vocabulary = kWidth};

inline Buffer ScratchFor(const Device& device, DType compute) {
  return *device.Allocate(ScratchBytes(device, compute, kLimits), "scratch");
}

// In fp32, on a stream of their own.
struct SmallOps {
  Device device = *Device::Cuda();
  Stream stream = device.CallerStream();
  Buffer scratch = ScratchFor(device, DType::kFloat32);
  std::unique_ptr<Ops> ops = *NewOps(device, DType::kFloat32, kLimits, scratch.span());
};

// With arrays that both ops and the test reach.
template <class Memory>
struct SmallOpsOn : SmallOps {
  Buffer shared = *device.AllocateShared(sizeof(Memory), "arrays");
  Memory* memory = ::new (shared.data()) Memory;
};

}  // namespace ebb::gpt
