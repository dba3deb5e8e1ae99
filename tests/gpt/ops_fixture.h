// Ops of any dtype on any kind of device, with scratch of their own and arrays that they reach. The
// cases on CUDA are part of two programs. One of them uses the real runtime, and skips its tests
// without a device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <memory_resource>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "../optim/every_target.h"
#include "../print_dtype.h"
#include "ebb/runtime/device/device.h"
#include "numbers.h"
#include "ops/ops.h"
#include "shared_memory.h"

namespace ebb::gpt {

constexpr DType kComputeTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

struct OpsCase {
  DeviceKind kind = DeviceKind::kCpu;
  DType compute = DType::kFloat32;
};
inline std::string OpsCaseName(const OpsCase& on) {
  return (on.kind == DeviceKind::kCuda ? "cuda_" : "cpu_") + std::string(Name(on.compute));
}
inline void PrintTo(const OpsCase& on, std::ostream* out) {
  *out << OpsCaseName(on);
}
inline std::string OpsTestName(const testing::TestParamInfo<OpsCase>& info) {
  return OpsCaseName(info.param);
}
inline std::vector<OpsCase> OpsCases(std::initializer_list<DeviceKind> kinds = {
                                         DeviceKind::kCpu, DeviceKind::kCuda}) {
  std::vector<OpsCase> cases;
  for (DeviceKind kind : kinds) {
    for (DType compute : kComputeTypes) cases.push_back({kind, compute});
  }
  return cases;
}

// Work that a call has enqueued has run when the call's statement ends.
class TestOps {
 public:
  TestOps(const Device& device, DType compute, const OpsLimits& limits)
      : stream_(device.CallerStream()),
        scratch_(*device.Allocate(std::max<int64_t>(ScratchBytes(device, compute, limits), 1),
                                  "scratch of the ops")),
        ops_(*NewOps(device, compute, limits, scratch_.span())) {}

  class Call {
   public:
    explicit Call(const TestOps& ops) : ops_(ops) {}
    ~Call() {
      EXPECT_TRUE(ops_.ops_->status().ok()) << ops_.ops_->status();
      ops_.stream_.WaitIdle();
      EXPECT_TRUE(ops_.stream_.status().ok()) << ops_.stream_.status();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    Ops* operator->() const { return ops_.ops_.get(); }

   private:
    const TestOps& ops_;
  };
  Call operator->() const { return Call(*this); }

 private:
  mutable Stream stream_;
  Buffer scratch_;
  std::unique_ptr<Ops> ops_;
};

class OpsTest : public testing::TestWithParam<OpsCase> {
 protected:
  void SetUp() override {
    if (!OnCuda()) return;
    absl::StatusOr<Device> cuda = Device::Cuda();
    if (!cuda.ok()) GTEST_SKIP() << cuda.status();
    memory_.emplace(*std::move(cuda));
    std::pmr::set_default_resource(&*memory_);
  }
  void TearDown() override { std::pmr::set_default_resource(nullptr); }

  static DType Compute() { return GetParam().compute; }
  static bool OnCuda() { return GetParam().kind == DeviceKind::kCuda; }
  // On a device handle of their own, as for a rank. `threads`: of the CPU.
  static TestOps NewTestOps(const OpsLimits& limits, int threads = 2) {
    return TestOps(NewDevice(threads), Compute(), limits);
  }
  static Device NewDevice(int threads) { return OnCuda() ? *Device::Cuda() : Device::Cpu(threads); }
  static Array Random(int64_t count, uint64_t seed, double deviation = 1) {
    return Array::Random(Compute(), count, seed, deviation);
  }
  static Array Empty(int64_t count) { return Array(Compute(), count); }

  // Runs it for each SIMD target of the CPU; once on other devices.
  template <class Body>
  static void ForEveryTarget(const Body& body) {
    if (OnCuda()) return body();
    optim::ForEveryTarget(body);
  }

 private:
  std::optional<SharedMemory> memory_;
};

}  // namespace ebb::gpt
