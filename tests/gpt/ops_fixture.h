// Ops of any dtype and number of threads with scratch of their own.
#pragma once

#include <memory>
#include <new>
#include <span>
#include <string>

#include "../print_dtype.h"
#include "numbers.h"
#include "ops/ops.h"

namespace ebb::gpt {

constexpr DType kComputeTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Memory at a multiple of 64 bytes, as the engine's workspace is.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t bytes)
      : size_(static_cast<size_t>(bytes)), data_(new (kAlignment) std::byte[size_]) {}
  ~AlignedBytes() { ::operator delete[](data_, kAlignment); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  std::span<std::byte> span() const { return {data_, size_}; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  size_t size_;
  std::byte* data_;
};

struct TestOps {
  TestOps(DType compute, int threads, const OpsLimits& limits)
      : scratch(CpuScratchBytes(compute, threads, limits)),
        ops(NewCpuOps(compute, threads, scratch.span())) {}
  Ops* operator->() const { return ops.get(); }
  AlignedBytes scratch;
  std::unique_ptr<Ops> ops;
};

inline std::string DTypeName(const testing::TestParamInfo<DType>& info) {
  return std::string(Name(info.param));
}

}  // namespace ebb::gpt
