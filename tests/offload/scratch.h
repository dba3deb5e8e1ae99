// Directories and memory for tests of the disk. EBB_TEST_DISK names the directory to test on;
// otherwise it is the system's directory for temporary files.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/shard_file.h"

namespace ebb::testing {

// A new directory that any user may write to. It is removed with all its contents.
class Scratch {
 public:
  Scratch() : Scratch(Disk()) {}
  explicit Scratch(const std::string& parent) : path_(parent + "/ebb-test-XXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr) << path_;
    std::filesystem::permissions(path_, std::filesystem::perms::all);
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::vector<std::string> Directories(int count) const {
    std::vector<std::string> made;
    for (int i = 0; i < count; ++i) {
      made.push_back(path_ + "/disk" + std::to_string(i));
      std::filesystem::create_directory(made.back());
      std::filesystem::permissions(made.back(), std::filesystem::perms::all);
    }
    return made;
  }
  std::vector<std::string> Entries() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
      if (!entry.is_directory()) names.push_back(entry.path().filename());
    }
    return names;
  }

 private:
  static std::string Disk() {
    const char* disk = std::getenv("EBB_TEST_DISK");
    return disk == nullptr ? std::filesystem::path(::testing::TempDir()).parent_path().string()
                           : std::string(disk);
  }

  std::string path_;
};

// Aligned for transfers.
inline PinnedMemory Memory(int64_t bytes) {
  return *AllocatePinned(bytes, false, "a test");
}

inline void FillRandomly(std::span<std::byte> bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t value = random();
    std::memcpy(&bytes[at], &value, std::min(sizeof(value), bytes.size() - at));
  }
}

}  // namespace ebb::testing
