// The text to train on: bytes of files, the last twentieth held out, and batches of it that are
// pure functions of a counter.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ebb::gpt {

// Every regular, readable file under /usr/share/common-licenses, sorted by name, each once however
// many links lead to it.
absl::StatusOr<std::vector<std::string>> DefaultTextFiles();

class Text {
 public:
  // The files one after the other. Each part must hold a sequence and the byte after it.
  static absl::StatusOr<Text> Load(std::span<const std::string> paths, int64_t context);
  static absl::StatusOr<Text> FromBytes(std::vector<uint8_t> bytes, int64_t context);

  uint64_t fingerprint() const { return fingerprint_; }  // of all bytes
  int64_t training_bytes() const { return held_out_begin_; }
  int64_t held_out_bytes() const { return static_cast<int64_t>(bytes_.size()) - held_out_begin_; }

  // Training sequence number `index` of those drawn with `seed`: tokens, and as targets the byte
  // after each. A batch of a step is the sequences step * batch + i, so it is the same whichever
  // ranks draw which.
  void Training(uint64_t seed, uint64_t index, std::span<int32_t> tokens,
                std::span<int32_t> targets) const;
  // Sequence `index` of `count` spread evenly over the held-out part.
  void HeldOut(int64_t index, int64_t count, std::span<int32_t> tokens,
               std::span<int32_t> targets) const;

 private:
  void Copy(int64_t begin, std::span<int32_t> tokens, std::span<int32_t> targets) const;

  std::vector<uint8_t> bytes_;
  uint64_t fingerprint_ = 0;
  int64_t held_out_begin_ = 0;
};

}  // namespace ebb::gpt
