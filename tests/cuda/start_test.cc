// The real CUDA runtime and NCCL: programs linked with them start on every machine. Tests that need
// a device are skipped without one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "add.h"
#include "ebb/runtime/comm/nccl/nccl_world.h"
#include "ebb/runtime/device/device.h"
#if EBB_NCCL
#include "ebb/runtime/comm/nccl/library.h"
#include "tests/status.h"
#endif

namespace ebb {
namespace {

using ::testing::HasSubstr;

TEST(CudaStart, ListsDevicesOrTheReasonForNone) {
  const auto count = Device::CudaDevices();
  const auto device = Device::Cuda();
  EXPECT_EQ(count.ok(), device.ok());
  if (count.ok()) {
    EXPECT_GT(*count, 0);
    EXPECT_THAT(device->description(), HasSubstr("CUDA device 0"));
    return;
  }
  EXPECT_THAT(device.status(), testing::StatusIs(absl::StatusCode::kUnavailable, "--device cpu"));
}

TEST(CudaStart, KernelsRunInTheOrderOfTheStream) {
  const auto device = Device::Cuda();
  if (!device.ok()) GTEST_SKIP() << device.status();
  constexpr int kCount = 100'000;
  const int64_t bytes = kCount * int64_t{sizeof(float)};
  const Buffer memory = *device->Allocate(bytes, "test");
  auto* const values = reinterpret_cast<float*>(memory.data());
  std::vector<float> seen(kCount, -1);
  Event event = *device->NewEvent();
  Stream first = *device->NewStream("first"), second = *device->NewStream("second");
  for (int i = 0; i < 100; ++i) {
    testing::EnqueueAdd(first.view(), values, kCount, 1);
    first.Record(event);
    second.Wait(event);
    testing::EnqueueAdd(second.view(), values, kCount, 2);
    second.Record(event);
    first.Wait(event);
  }
  second.Copy(seen.data(), values, bytes);
  second.WaitIdle();
  EXPECT_EQ(seen, std::vector<float>(kCount, 300));
  EXPECT_OK(device->status());
}

#if EBB_NCCL
TEST(NcclStart, TheLibraryIsFoundOrTheErrorNamesIt) {
  const auto nccl = LoadNccl();
  if (!nccl.ok()) {
    EXPECT_THAT(nccl.status(), testing::StatusIs(absl::StatusCode::kUnavailable, "libnccl.so.2"));
    GTEST_SKIP() << nccl.status();
  }
  EXPECT_GE((*nccl)->version, 21900);
  EXPECT_THAT(NcclVersionText((*nccl)->version), HasSubstr("2."));
  EXPECT_EQ(*LoadNccl(), *nccl);
}

TEST(NcclStart, VersionsAreTextsWithDots) {
  EXPECT_EQ(NcclVersionText(22809), "2.28.9");
  EXPECT_EQ(NcclVersionText(2804), "2.8.4");
}
#else
TEST(NcclStart, BuildWithoutNcclSaysSo) {
  EXPECT_EQ(NewNcclWorld(nullptr, Device::Cpu()).status().code(), absl::StatusCode::kUnimplemented);
}
#endif

}  // namespace
}  // namespace ebb
