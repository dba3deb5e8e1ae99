// The ways to the disk, as parameters of tests.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/shard_file.h"
#include "locked_memory.h"
#include "scratch.h"

namespace ebb::testing {

struct Backend {
  std::string name;
  IoBackend backend;
  int directories;
  bool own_thread = true;
};
inline void PrintTo(const Backend& backend, std::ostream* out) {
  *out << backend.name;
}

inline std::vector<Backend> Backends() {
  return {{"uring", IoBackend::kUring, 1},
          {"uring_striped_over_3", IoBackend::kUring, 3},
          {"threads", IoBackend::kThreads, 1},
          {"threads_striped_over_2", IoBackend::kThreads, 2}};
}

inline std::vector<Backend> Backends(IoBackend only) {
  std::vector<Backend> backends;
  for (const Backend& backend : Backends())
    if (backend.backend == only) backends.push_back(backend);
  return backends;
}

// For tests with one thread that starts and awaits the transfers.
inline Backend Driven() {
  return {"uring", IoBackend::kUring, 1, /*own_thread=*/false};
}

inline std::string NameOf(const ::testing::TestParamInfo<Backend>& info) {
  return info.param.name;
}

class OnEveryBackend : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    auto file = ShardFile::Create(Options(4096));
    if (GetParam().backend == IoBackend::kUring && absl::IsFailedPrecondition(file.status())) {
      GTEST_SKIP() << file.status();
    }
    ASSERT_TRUE(file.ok()) << file.status();
  }

  ShardFile::Options Options(int64_t bytes) const {
    ShardFile::Options options;
    options.directories = scratch_.Directories(GetParam().directories);
    options.name = "shards";
    options.bytes = bytes;
    options.aio.block_bytes = 64 << 10;
    options.aio.queue_depth = 8;
    options.backend = GetParam().backend;
    options.own_thread = GetParam().own_thread;
    return options;
  }
  // Null: the test has failed, or is skipped because the system refuses a ring of that size, for
  // example while it still counts SetUp's ring.
  [[nodiscard]] static std::unique_ptr<ShardFile> Make(const ShardFile::Options& options) {
    auto file = ShardFile::Create(options);
    if (file.ok()) return *std::move(file);
    const auto end = [&](bool skip) {
      if (skip) GTEST_SKIP() << file.status();
      FAIL() << file.status();
    };
    end(IsForLackOfMemlock(options, file.status()));
    return nullptr;
  }
  // Never if the system counts nothing, as for root: a refused ring is then an error.
  static bool IsForLackOfMemlock(const ShardFile::Options& options, const absl::Status& status) {
    return options.backend == IoBackend::kUring && absl::IsFailedPrecondition(status) &&
           absl::StrContains(status.message(), kRaiseLockedMemory) && HasMemlockLimit();
  }
  static absl::Status Read(ShardFile& file, int64_t offset, std::span<std::byte> data) {
    IoTransfer transfer;
    file.StartRead(transfer, offset, data.data(), static_cast<int64_t>(data.size()));
    return file.Wait(transfer);
  }
  static absl::Status Write(ShardFile& file, int64_t offset, std::span<const std::byte> data) {
    IoTransfer transfer;
    file.StartWrite(transfer, offset, data.data(), static_cast<int64_t>(data.size()));
    return file.Wait(transfer);
  }
  // The first file over which it is striped, as messages call it.
  std::string FirstPath() const { return scratch_.path() + "/disk0 (shards)"; }

  Scratch scratch_;
};

}  // namespace ebb::testing

// ASSERT_MADE(file, Make(options)); ends a test that Make has failed or skipped.
#define ASSERT_MADE(file, make) \
  auto file = make;             \
  if (file == nullptr) return
