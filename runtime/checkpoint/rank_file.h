// One rank's file of a checkpoint, a safetensors file. Its metadata has, by the name of each tensor, checksums of its
// data in blocks of 4 MiB (ebb/optim/checksum.h): 16 hexadecimal digits a block, end to end. So a reader of a part of
// a tensor can check that part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/checkpoint/streamed_file.h"

namespace ebb {

inline constexpr int64_t kCheckedBlock = int64_t{4}
                                         << 20;  // bytes; the last one of a tensor may have less
inline constexpr int64_t kDataAlignment = 4096;

constexpr int64_t CheckedBlocks(int64_t bytes) {
  return (bytes + kCheckedBlock - 1) / kCheckedBlock;
}

// "rank-00002-of-00004.safetensors"
std::string RankFileName(int rank, int ranks);

// What a manifest says of a file that is there. Its header is read and its checksum made; its data is not.
absl::StatusOr<Manifest::File> DescribeRankFile(const std::string& path);

class RankFileWriter {
 public:
  // `tensors`: in the order in which their data comes; their offsets are set here.
  // `metadata`: what else the file says; no name of a tensor among it. `memory`: as StreamedFile's.
  static absl::StatusOr<RankFileWriter> Create(std::string path, std::vector<StoredTensor> tensors,
                                               std::map<std::string, std::string> metadata,
                                               IoBackend backend = IoBackend::kAuto,
                                               std::span<std::byte> memory = {});
  RankFileWriter(RankFileWriter&&) = default;

  // The next bytes. One call is of one tensor; a tensor may take several.
  absl::Status Append(std::span<const std::byte> bytes);
  // When all data has come: writes the header, and returns when all of it is on the disk.
  absl::Status Finish();

 private:
  explicit RankFileWriter(StreamedFile file) : file_(std::move(file)) {}

  StreamedFile file_;
  SafetensorsHeader header_;
  size_t tensor_ = 0;              // the one under way
  int64_t of_tensor_ = 0;          // bytes of it that have come
  optim::RunningChecksum sum_;     // of its block under way
  std::vector<std::string> sums_;  // by tensor
};

}  // namespace ebb
