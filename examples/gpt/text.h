// The text to train on: bytes of files, the last twentieth held out, and batches of it that are
// pure functions of a counter.
//
// Small files are read at once and held. Larger ones stay where they are: what a batch takes is read
// from them when it is asked for, so text may be larger than memory. Pipes are held, up to a limit.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "data_files.h"

namespace ebb::gpt {

// Every regular, readable file under /usr/share/common-licenses, sorted by name, each once however
// many links lead to it.
absl::StatusOr<std::vector<std::string>> DefaultTextFiles();

class Text {
 public:
  // What is held of files, all together; of one pipe; and of memory that is free, a quarter at most.
  static constexpr int64_t kFileHeldMax = int64_t{4} << 20, kFilesHeldMax = int64_t{256} << 20;
  static constexpr int64_t kPipeMax = int64_t{1} << 30;

  // The files one after the other. Each part must hold a sequence and the byte after it. Refuses
  // devices, and pipes that give more than is held.
  static absl::StatusOr<Text> Load(std::span<const std::string> paths, int64_t context);
  static absl::StatusOr<Text> FromBytes(std::vector<uint8_t> bytes, int64_t context);

  // Of the sizes and the bytes; of more than 64 MiB, of pieces spread evenly.
  uint64_t fingerprint() const { return fingerprint_; }
  int64_t training_bytes() const { return held_out_begin_; }
  int64_t held_out_bytes() const { return size_ - held_out_begin_; }
  // In memory. It needs no place in the engine's memory check, which is of what the system has left once
  // the text is there.
  int64_t held_bytes() const;

  // Training sequence number `index` of those drawn with `seed`: tokens, and as targets the byte
  // after each. A batch of a step is the sequences step * batch + i, so it is the same whichever
  // ranks draw which. Any thread. An error: a file cannot be read any more, and all numbers are 0.
  absl::Status Training(uint64_t seed, uint64_t index, std::span<int32_t> tokens,
                        std::span<int32_t> targets) const;
  // Sequence `index` of `count` spread evenly over the held-out part.
  absl::Status HeldOut(int64_t index, int64_t count, std::span<int32_t> tokens,
                       std::span<int32_t> targets) const;

 private:
  // A file, or several that are held.
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
