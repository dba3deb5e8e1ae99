// One rank's file of a checkpoint, a safetensors file. Its tensors are slices of parameters and
// states. Its metadata has, under each slice's name, the checksums of the slice's blocks of 4 MiB
// (ebb/optim/checksum.h): 16 hexadecimal digits a block, end to end. So a reader of a part of a
// slice can check that part.
//
// A state in blocks has its codes in a tensor of bytes. The next tensor has the scales, under the
// state's name with ".scales" behind it, counted in blocks: "exp_avg.scales/block0.weight@16:32".
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/base/encoding.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/checkpoint/streamed_file.h"

namespace ebb {

inline constexpr int64_t kCheckedBlock = int64_t{4}
                                         << 20;  // bytes; a tensor's last block may be shorter
inline constexpr int64_t kDataAlignment = 4096;

constexpr int64_t CheckedBlocks(int64_t bytes) {
  return (bytes + kCheckedBlock - 1) / kCheckedBlock;
}

inline constexpr std::string_view kMasterClass = "master", kParameterClass = "parameter";
inline constexpr std::string_view kScalesSuffix = ".scales";

// A slice, and its name: "master/block0.weight@4096:8192" are elements 4096 to 8191 of the flattened
// parameter block0.weight.
struct SliceName {
  // "master" for trainable parameters, "parameter" for frozen ones, and for other arrays the
  // optimizer state's own name ("exp_avg").
  std::string of;
  std::string parameter;  // which may hold '/', '@' and ':' itself
  int64_t begin = 0, end = 0;

  friend bool operator==(const SliceName&, const SliceName&) = default;
};
// Whether a parameter, and an optimizer state, may have this name.
bool MayBeParameter(std::string_view name);
bool MayBeState(std::string_view name);
std::string NameOf(const SliceName& slice);
// The parameter of a slice of a tensor rank's block: "block0.weight@1of2".
std::string BlockName(std::string_view parameter, int rank, int ranks);
// Nothing: the text is not the name of a slice, or the slice is empty.
std::optional<SliceName> ParseSliceName(std::string_view text);

// "rank-00002-of-00004.safetensors"
std::string RankFileName(int rank, int ranks);

// The header of a file, and the manifest's entry for the file. Reads no data.
struct RankFileHeader {
  SafetensorsHeader header = {};
  Manifest::File entry = {};
};
absl::StatusOr<RankFileHeader> ReadRankFileHeader(const std::string& path);
// kDataLoss names the file and how it differs from its entry in the manifest.
absl::Status CheckEntry(const Manifest::File& found, const Manifest::File& saved,
                        const std::string& path);

class RankFileWriter {
 public:
  struct Slice {
    SliceName name;
    Encoding encoding = DType::kFloat32;
  };
  // `slices`: in the order of their data. `metadata`: more metadata of the file, without names of
  // slices. `memory`: as StreamedFile's.
  static absl::StatusOr<RankFileWriter> Create(std::string path, const std::vector<Slice>& slices,
                                               std::map<std::string, std::string> metadata,
                                               IoBackend backend = IoBackend::kAuto,
                                               std::span<std::byte> memory = {});
  RankFileWriter(RankFileWriter&&) = default;

  // Appends the next values, in the encoding of their slice. A call has values of one slice; a slice
  // may take several calls. Each call but a slice's last has whole blocks.
  absl::Status Append(std::span<const float> values);
  // Call it after all data. Writes the header, and returns when the whole file is on the disk.
  absl::Status Finish();

 private:
  explicit RankFileWriter(StreamedFile file) : file_(std::move(file)) {}
  std::span<const std::byte> EncodedAs(const Encoding& encoding, std::span<const float> values);
  absl::Status AppendBytes(std::span<const std::byte> bytes);

  StreamedFile file_;
  SafetensorsHeader header_;
  size_t tensor_ = 0;                // the one under way
  int64_t of_tensor_ = 0;            // bytes of it that have come
  optim::RunningChecksum sum_;       // of its block under way
  std::vector<std::string> sums_;    // by tensor
  std::vector<Encoding> encodings_;  // by tensor
  std::vector<std::byte> cast_;
  std::vector<float> scales_;  // of the codes so far, which come behind them
};

}  // namespace ebb
