// The files of --data that are read piece by piece. There may be more of them than a process may
// open. So only a few stay open, and the others are opened again when they are read.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "data/text_file.h"

namespace ebb::gpt {

class DataFiles {
 public:
  static constexpr size_t kOpenMax = 16;  // not counting files that are being read

  // The file's number. `file` need not stay open.
  size_t Add(const TextFile& file);
  // Reads from `begin` of file number `file`. An error: the file cannot be read, it ends before, or
  // it was replaced or changed since it was added. Any thread.
  absl::Status ReadAt(size_t file, int64_t begin, std::span<uint8_t> bytes);

 private:
  struct Known {
    std::string path;
    TextFile::Version version;
  };
  struct Opened {
    size_t number = 0;
    std::shared_ptr<const TextFile> file;
  };

  absl::StatusOr<std::shared_ptr<const TextFile>> Get(size_t number);
  std::shared_ptr<const TextFile> Find(size_t number);  // null: not open

  std::vector<Known> known_;
  std::mutex mutex_;
  std::vector<Opened> opened_;  // under mutex_; the file that was read last is at the end
};

}  // namespace ebb::gpt
