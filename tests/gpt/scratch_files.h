// A test's own folder, removed when the test is over.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "gtest/gtest.h"

namespace ebb::gpt {

class ScratchFiles {
 public:
  ScratchFiles() {
    std::string pattern = testing::TempDir() + "ebb-gpt-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~ScratchFiles() { std::filesystem::remove_all(folder_); }

  std::string Path(std::string_view name) const { return folder_ + "/" + std::string(name); }
  std::string Write(std::string_view name, std::string_view contents) const {
    std::ofstream(Path(name), std::ios::binary) << contents;
    return Path(name);
  }
  std::string Read(std::string_view name) const {
    std::ifstream file(Path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  std::string Folder(std::string_view name) const {
    std::filesystem::create_directories(Path(name));
    return Path(name);
  }
  size_t Count() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder_),
                                             std::filesystem::directory_iterator()));
  }

 private:
  std::string folder_;
};

}  // namespace ebb::gpt
