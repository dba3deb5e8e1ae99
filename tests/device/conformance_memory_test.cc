// Memory of every kind of device, and what copies and zeroes do with it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "conformance.h"

namespace ebb::conformance_memory_test {
namespace {

using ::testing::HasSubstr;

TEST_P(DeviceConformance, CopiesAndZeroes) {
  constexpr int64_t kLarge = (int64_t{17} << 20) + 13;  // large enough to bypass the caches
  Buffer source = Allocate(kLarge + 64), destination = Allocate(kLarge + 64);
  std::vector<std::byte> values(static_cast<size_t>(source.bytes()));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<std::byte>((i * 7 + i / 251) & 0xff);
  Write(source.data(), values);
  Stream caller = device_->CallerStream(), beside = NewStream();
  for (Stream* stream : {&caller, &beside}) {
    for (const int64_t bytes :
         {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{4097}, int64_t{3} << 20, kLarge}) {
      for (const int64_t shift : {0, 5, 33}) {
        stream->Zero(destination.data(), destination.bytes());
        stream->Copy(destination.data() + shift, source.data() + 3, bytes);
        stream->WaitIdle();
        const std::vector<std::byte> copied = Read(destination.data(), shift + bytes + 1);
        EXPECT_EQ(std::memcmp(copied.data() + shift, values.data() + 3, static_cast<size_t>(bytes)),
                  0);
        EXPECT_EQ(copied.back(), std::byte{0}) << bytes;
        if (shift > 0) {
          EXPECT_EQ(copied[static_cast<size_t>(shift - 1)], std::byte{0}) << bytes;
        }
      }
    }
  }
}

TEST_P(DeviceConformance, BuffersAreZeroFilledAndAligned) {
  for (const int64_t bytes : {int64_t{1}, int64_t{4096}, int64_t{100'000}, (int64_t{2} << 20) - 1,
                              int64_t{2} << 20, (int64_t{5} << 20) + 12345}) {
    const Buffer buffer = *device_->Allocate(bytes, "test");
    EXPECT_EQ(buffer.bytes(), bytes);
    const uintptr_t alignment = !on_cpu()                   ? 256
                                : bytes >= int64_t{2} << 20 ? uintptr_t{2} << 20
                                                            : 4096;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % alignment, 0u) << bytes;
    const std::vector<std::byte> values = Read(buffer.data(), bytes);
    EXPECT_TRUE(
        std::all_of(values.begin(), values.end(), [](std::byte b) { return b == std::byte{0}; }));
    // The next buffer, which may get this memory, is still zero.
    Write(buffer.data(), std::vector<std::byte>(static_cast<size_t>(bytes), std::byte{1}));
  }
  EXPECT_EQ(device_->Allocate(0, "nothing")->bytes(), 0);
}

TEST_P(DeviceConformance, SharedMemoryIsTheHostsAndTheDevices) {
  constexpr int64_t kBytes = 3 * 4096;
  const Buffer shared = *device_->AllocateShared(kBytes, "shared");
  const Buffer memory = Allocate(kBytes);
  EXPECT_EQ(Read(shared.data(), kBytes), std::vector<std::byte>(kBytes));
  for (const std::byte value : shared.span()) EXPECT_EQ(value, std::byte{0});
  std::fill(shared.span().begin(), shared.span().end(), std::byte{7});
  Stream stream = NewStream();
  stream.Copy(memory.data(), shared.data(), kBytes);
  stream.Zero(shared.data(), kBytes);
  stream.WaitIdle();
  EXPECT_EQ(Read(memory.data(), kBytes), std::vector<std::byte>(kBytes, std::byte{7}));
  for (const std::byte value : shared.span()) EXPECT_EQ(value, std::byte{0});
  EXPECT_FALSE(device_->AllocateShared(-1, "shared").ok());
}

TEST_P(DeviceConformance, LockedHostMemoryIsCopiedFromAndTo) {
  constexpr int64_t kBytes = 3 * 4096;
  std::vector<std::byte> host(kBytes, std::byte{7});
  const Buffer memory = Allocate(kBytes);
  for (int lap = 0; lap < 2; ++lap) {  // locked again after unlocking
    LockedRange locked = *device_->LockHostMemory(host, "test");
    EXPECT_EQ(locked.span().data(), host.data());
    EXPECT_EQ(locked.span().size(), host.size());
    const LockedRange moved = std::move(locked);
    Stream stream = NewStream();
    stream.Copy(memory.data(), moved.span().data(), kBytes);
    stream.Zero(memory.data(), 1);
    stream.Copy(moved.span().data(), memory.data(), kBytes);
    stream.WaitIdle();
    EXPECT_EQ(host.front(), std::byte{0});
    EXPECT_EQ(host.back(), std::byte{7});
    host.front() = std::byte{7};
  }
  EXPECT_TRUE(device_->LockHostMemory({}, "nothing")->span().empty());
}

TEST_P(DeviceConformance, ImpossibleAllocationsNamePurposeAndSize) {
  for (const int64_t bytes :
       {int64_t{1} << 46, int64_t{1} << 50, std::numeric_limits<int64_t>::max()}) {
    const absl::Status status = device_->Allocate(bytes, "optimizer states").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("optimizer states"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(bytes)));
  }
  EXPECT_EQ(device_->Allocate(-1, "x").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(DeviceConformance, ReleasedBufferIsPoisonedInDebugBuilds) {
  if (!kPoisonReleased) GTEST_SKIP() << "release build";
  if (!on_cpu()) GTEST_SKIP() << "released memory of a GPU cannot be looked at";
  for (const int64_t bytes : {int64_t{1000}, int64_t{3} << 20}) {
    Buffer buffer = *device_->Allocate(bytes, "test");
    // Through a volatile copy of the address, because the compiler may assume that no code reads
    // released memory.
    std::byte* volatile address = buffer.data();
    std::memset(buffer.data(), 1, static_cast<size_t>(bytes));
    { const Buffer released = std::move(buffer); }
    const std::byte* stale = address;
    EXPECT_TRUE(
        std::all_of(stale, stale + bytes, [](std::byte b) { return b == std::byte{kPoison}; }));
  }
}

}  // namespace
}  // namespace ebb::conformance_memory_test
