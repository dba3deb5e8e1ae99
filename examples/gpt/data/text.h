// The text to train on, which is the bytes of files. The last twentieth is held out for evaluation.
// Each batch is a pure function of a counter.
//
// Small files are read at once and held in memory. Larger ones stay on the disk: a batch's text is
// read when it is needed, so the text may be larger than memory. Text from pipes is held in memory,
// up to a limit.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb::gpt {

// Every regular, readable file under /usr/share/common-licenses, sorted by name; each once, even if
// several links lead to it.
absl::StatusOr<std::vector<std::string>> DefaultTextFiles();

// A file of --data that is open for reading.
class TextFile {
 public:
  // Which file it is, and at which time. If two versions are equal, so are the contents.
  struct Version {
    uint64_t device = 0, inode = 0;
    int64_t size = 0, seconds = 0, nanoseconds = 0;  // of its last change
    bool operator==(const Version&) const = default;
  };

  // Refuses a missing file, a folder or a device. Does not wait for the writer of a pipe.
  static absl::StatusOr<std::shared_ptr<const TextFile>> Open(const std::string& path);
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;
  ~TextFile();

  const std::string& path() const { return path_; }
  const Version& version() const { return version_; }
  // In bytes; 0 for a pipe, and for files that the system fills when they are read.
  int64_t size() const { return version_.size; }
  // Reads from `begin`. If the file ends before all of `bytes` are read, it is an error. Any
  // thread.
  absl::Status ReadAt(int64_t begin, std::span<uint8_t> bytes) const;
  // Appends all that follows, at most `most` bytes, to `bytes`. Waits for a pipe's writer, and logs
  // that.
  absl::Status ReadToEnd(int64_t most, std::vector<uint8_t>& bytes) const;

 private:
  TextFile(const std::string& path, int descriptor) : path_(path), descriptor_(descriptor) {}
  absl::Status CannotBeRead(int error) const;

  const std::string path_;
  const int descriptor_;
  Version version_;
};

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
    // The file, if it is read piece by piece; empty: the bytes are held.
    std::string path;
    TextFile::Version version;
    std::vector<uint8_t> bytes;
  };

  absl::Status Append(const std::string& path);
  absl::Status Finish(int64_t context);
  absl::Status Read(int64_t begin, std::span<uint8_t> bytes) const;
  absl::Status Copy(int64_t begin, std::span<int32_t> tokens, std::span<int32_t> targets) const;

  // There may be more files than a process may open, so only the one that was read last stays open.
  struct Opened {
    std::mutex mutex;
    std::string path;
    std::shared_ptr<const TextFile> file;
  };
  absl::StatusOr<std::shared_ptr<const TextFile>> Open(const Part& part) const;

  std::vector<Part> parts_;
  std::unique_ptr<Opened> opened_ = std::make_unique<Opened>();
  int64_t size_ = 0;
  uint64_t fingerprint_ = 0;
  int64_t held_out_begin_ = 0;
};

}  // namespace ebb::gpt
