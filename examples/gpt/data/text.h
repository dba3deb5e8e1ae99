// The text to train on, which is the bytes of files. The last twentieth is held out for evaluation.
// Each batch is a pure function of a counter.
//
// Small files are read at once and held in memory. Larger ones stay on the disk: a batch's text is
// read when it is needed, so the text may be larger than memory. Text from pipes is held in memory,
// up to a limit.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "data/text_file.h"

namespace ebb::gpt {

// Every regular, readable file under /usr/share/common-licenses, sorted by name; each once, even if
// several links lead to it.
absl::StatusOr<std::vector<std::string>> DefaultTextFiles();

class Text {
 public:
  // How much is held of one file, of all files together, and of one pipe; of a pipe also at most a
  // quarter of free memory.
  static constexpr int64_t kFileHeldMax = int64_t{4} << 20, kFilesHeldMax = int64_t{256} << 20;
  static constexpr int64_t kPipeMax = int64_t{1} << 30;

  // Loads the files, one after the other. Each part must have a sequence and the byte after it.
  // Refuses devices, and pipes with more bytes than may be held.
  static absl::StatusOr<Text> Load(std::span<const std::string> paths, int64_t context);
  static absl::StatusOr<Text> FromBytes(std::vector<uint8_t> bytes, int64_t context);

  // A hash of the sizes and the bytes; above 64 MiB, of pieces spread evenly.
  uint64_t fingerprint() const { return fingerprint_; }
  int64_t training_bytes() const { return held_out_begin_; }
  int64_t held_out_bytes() const { return size_ - held_out_begin_; }
  // Bytes held in memory. The engine's memory check need not count them, because it looks at the
  // memory that is free once the text is loaded.
  int64_t held_bytes() const;

  // Training sequence number `index` of those drawn with `seed`: tokens, and as targets the byte
  // after each. A step's batch is the sequences step * batch + i, whichever rank draws which of
  // them. Any thread. An error: a file cannot be read any more, and all numbers are 0.
  absl::Status Training(uint64_t seed, uint64_t index, std::span<int32_t> tokens,
                        std::span<int32_t> targets) const;
  // Sequence `index` of `count` spread evenly over the held-out part.
  absl::Status HeldOut(int64_t index, int64_t count, std::span<int32_t> tokens,
                       std::span<int32_t> targets) const;

 private:
  // One file, or several files that are held.
  struct Part {
    int64_t begin = 0, size = 0;
    std::optional<size_t> file;  // in files_; none: the bytes are held
    std::vector<uint8_t> bytes;
  };

  absl::Status Append(const std::string& path);
  absl::Status Finish(int64_t context);
  absl::Status Read(int64_t begin, std::span<uint8_t> bytes) const;
  absl::Status Copy(int64_t begin, std::span<int32_t> tokens, std::span<int32_t> targets) const;

  std::vector<Part> parts_;
  std::unique_ptr<DataFiles> files_ = std::make_unique<DataFiles>();
  int64_t size_ = 0;
  uint64_t fingerprint_ = 0;
  int64_t held_out_begin_ = 0;
};

}  // namespace ebb::gpt
