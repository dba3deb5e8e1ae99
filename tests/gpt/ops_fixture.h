// Ops of any dtype on any kind of device, with scratch of their own and arrays that they reach. The
// cases on CUDA are part of two programs. One of them uses the real runtime, and skips its tests
// without a device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <new>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../optim/every_target.h"
#include "../print_dtype.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/device.h"
#include "gtest/gtest.h"
#include "ops/ops.h"

namespace ebb::gpt {

// Relative error of one rounding to the dtype.
inline double Rounding(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

// An array of any dtype, with an fp64 view of the values that it holds. Its memory comes from
// std::pmr's default, which a test may replace by a device's.
class Array {
 public:
  // NaN in every dtype, so that reads of unwritten numbers show.
  Array(DType dtype, int64_t count)
      : dtype_(dtype), bytes_(static_cast<size_t>(count * SizeOf(dtype)), std::byte{0xff}) {}
  // Normal numbers of the given deviation, rounded to the dtype.
  static Array Random(DType dtype, int64_t count, uint64_t seed, double deviation = 1) {
    Array array(dtype, count);
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal(0, deviation);
    for (int64_t i = 0; i < count; ++i) array.Set(i, normal(random));
    return array;
  }

  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  DType dtype() const { return dtype_; }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()) / SizeOf(dtype_); }
  bool operator==(const Array&) const = default;

  double operator[](int64_t i) const {
    switch (dtype_) {
      case DType::kBFloat16:
        return static_cast<float>(At<BFloat16>(i));
      case DType::kFloat16:
        return static_cast<float>(At<Float16>(i));
      default:
        return At<float>(i);
    }
  }
  void Set(int64_t i, double value) {
    switch (dtype_) {
      case DType::kBFloat16:
        At<BFloat16>(i) = BFloat16(static_cast<float>(value));
        break;
      case DType::kFloat16:
        At<Float16>(i) = Float16(static_cast<float>(value));
        break;
      default:
        At<float>(i) = static_cast<float>(value);
    }
  }
  std::vector<double> Values() const {
    std::vector<double> values(static_cast<size_t>(size()));
    for (int64_t i = 0; i < size(); ++i) values[static_cast<size_t>(i)] = (*this)[i];
    return values;
  }

 private:
  template <class T>
  T& At(int64_t i) {
    return reinterpret_cast<T*>(bytes_.data())[i];
  }
  template <class T>
  const T& At(int64_t i) const {
    return reinterpret_cast<const T*>(bytes_.data())[i];
  }
  DType dtype_;
  std::pmr::vector<std::byte> bytes_;
};

// got[i] within one rounding of its dtype plus `relative` times the largest magnitude in
// `expected`, which sums of that many terms of that size may have lost. `rounded`: for each element
// the magnitudes of what may have been rounded to that dtype on the way, summed; or empty.
inline void ExpectClose(const Array& got, const std::vector<double>& expected, double relative,
                        const std::string& what, const std::vector<double>& rounded = {}) {
  ASSERT_EQ(got.size(), static_cast<int64_t>(expected.size())) << what;
  double largest = 0;
  for (double e : expected) largest = std::max(largest, std::abs(e));
  // fp16 below 2^-14 has a fixed grid.
  const double grid = got.dtype() == DType::kFloat16 ? 0x1p-25 : 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    const double e = expected[static_cast<size_t>(i)];
    const double magnitudes = std::abs(e) + (rounded.empty() ? 0 : rounded[static_cast<size_t>(i)]);
    ASSERT_NEAR(got[i], e, Rounding(got.dtype()) * magnitudes + relative * largest + grid)
        << what << " at " << i;
  }
}

// Memory for a test's arrays that the host and a device reach at the same address.
class SharedMemory : public std::pmr::memory_resource {
 public:
  explicit SharedMemory(Device device) : device_(std::move(device)) {}

 private:
  // Each array has its own allocation, so that reads beyond it may be noticed. Allocations are kept
  // for the next array of that size, because making and freeing one takes a device some 100 us
  // each.
  void* do_allocate(size_t bytes, size_t) override {
    const std::scoped_lock lock(mutex_);
    if (const auto kept = free_.find(bytes); kept != free_.end()) {
      void* const data = kept->second;
      free_.erase(kept);
      return data;
    }
    absl::StatusOr<Buffer> buffer =
        device_.AllocateShared(static_cast<int64_t>(bytes), "a test's array");
    if (!buffer.ok()) throw std::bad_alloc();
    return buffers_.emplace_back(*std::move(buffer)).data();
  }
  void do_deallocate(void* data, size_t bytes, size_t) override {
    const std::scoped_lock lock(mutex_);
    free_.emplace(bytes, data);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  const Device device_;
  std::mutex mutex_;
  std::vector<Buffer> buffers_;
  std::multimap<size_t, void*> free_;
};

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
