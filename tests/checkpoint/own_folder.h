// A folder of checkpoints for each test, and damage to what is in it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/folder.h"

namespace ebb::testing {

// Does not exist when the test begins, and is removed when it ends.
class OwnFolderTest : public ::testing::Test {
 protected:
  ~OwnFolderTest() override { std::filesystem::remove_all(folder_); }

  // The checkpoint of a step.
  std::string At(int64_t step) const { return absl::StrCat(folder_, "/", CheckpointName(step)); }

  const std::string folder_ = Unused();

 private:
  static std::string Unused() {
    const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
    std::string name = absl::StrCat(test.test_suite_name(), "-", test.name(), "-", getpid());
    std::replace(name.begin(), name.end(), '/', '-');
    const std::string path = absl::StrCat(::testing::TempDir(), "ebb-", name);
    std::filesystem::remove_all(path);
    return path;
  }
};

// Below 0, `at` counts from the end of the file.
inline void FlipBit(const std::string& path, int64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  if (at < 0) at += static_cast<int64_t>(std::filesystem::file_size(path));
  file.seekg(at);
  const char byte = static_cast<char>(file.get() ^ 4);
  file.seekp(at);
  file.put(byte);
}

// Damage that a checkpoint may suffer.
using Damage = std::function<void(const std::string& checkpoint)>;

inline Damage Flips(const std::string& file, int64_t at) {
  return [=](const std::string& in) { FlipBit(in + file, at); };
}
inline Damage Cuts(const std::string& file, uintmax_t bytes) {
  return [=](const std::string& in) { std::filesystem::resize_file(in + file, bytes); };
}
inline Damage Removes(const std::string& file) {
  return [=](const std::string& in) { std::filesystem::remove_all(in + file); };
}

}  // namespace ebb::testing
