// The values of a checkpoint of any number of ranks: any interval of a parameter's masters or
// states, as fp32. Reads only the headers and blocks that it needs, and checks each against its
// checksum.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/base/encoding.h"
#include "ebb/runtime/base/io_backend.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/read_ahead.h"

namespace ebb {

class StoredValues {
 public:
  // Opens no file. The header of a file is read when one of its values may be asked for. `near`:
  // the file that has the first of them, as far as the caller knows.
  StoredValues(std::string checkpoint, Manifest manifest, int near = 0);
  StoredValues(StoredValues&&) = default;
  // Reads all headers, and checks that they have every element of each parameter and state exactly
  // once.
  absl::Status ReadAllHeaders();

  bool Has(const std::string& of, const std::string& parameter) const {
    const auto cut = cuts_.find(parameter);
    return arrays_.contains({of, cut == cuts_.end() ? parameter : cut->second.names.front()});
  }
  bool IsCut(const std::string& parameter) const { return cuts_.contains(parameter); }
  // The name under which a tensor rank's block of the parameter is stored, if it is cut like that;
  // otherwise "".
  std::string NameOfBlock(const ParameterSpec& parameter) const;
  // Reads these intervals ahead, for later calls of Read in this order. `memory`: as for ReadAhead.
  // Read also takes other intervals, without reading ahead.
  struct Interval {
    std::string of, parameter;
    int64_t begin = 0, end = 0;  // elements
  };
  absl::Status Expect(std::span<const Interval> intervals, IoBackend backend,
                      std::span<std::byte> memory = {});
  // Elements [begin, begin + values.size()): of the whole parameter, or of a block by its name. From
  // one thread at a time. After an error they are undefined.
  absl::Status Read(const std::string& of, const std::string& parameter, int64_t begin,
                    std::span<float> values);
  // The bytes that Read has read so far, in whole blocks.
  int64_t bytes_read() const { return bytes_read_; }
  // SaveOptions::of_this_rank of the rank with this number in the run that saved.
  absl::StatusOr<std::map<std::string, std::string>> OfRank(int rank);
  // The headers that were read so far.
  int headers_read() const { return static_cast<int>(read_.size()); }

 private:
  struct Piece {
    int rank = 0;
    int64_t begin = 0, end = 0;  // elements of the parameter
    int64_t at = 0;              // byte of the file
    DType dtype{};
    std::string sums;  // of its blocks

    int64_t bytes() const { return (end - begin) * SizeOf(dtype); }
  };
  using Key = std::pair<std::string, std::string>;  // class, or its scales; parameter
  struct Array {
    int64_t elements = 0;
    Encoding encoding = DType::kInt8;  // of its pieces of bytes
    std::map<int64_t, Piece> pieces;   // by their begin; those of the headers that were read

    bool has_codes(const Piece& piece) const {
      return encoding.block > 0 && piece.dtype == DType::kInt8;
    }
  };

  // A parameter that is cut: its blocks are arrays by names of their own.
  struct Cut {
    std::vector<int64_t> shape;
    Split split;
    std::vector<std::string> names;  // by tensor rank
  };
  void AddParameter(const Manifest::Parameter& parameter,
                    const std::map<std::string, std::string>& encodings);
  void AddArray(const Key& key, int64_t elements,
                const std::map<std::string, std::string>& encodings);
  absl::Status ReadBlocks(const std::string& of, const Cut& cut, int64_t begin,
                          std::span<float> values);
  // Reads the header of a rank's file, once.
  absl::Status AddFile(int rank);
  absl::Status AddPiece(const StoredTensor& tensor, SafetensorsHeader& header, int rank);
  // The piece with the element. Reads headers until one has it.
  absl::StatusOr<const Piece*> PieceAt(const Key& key, int64_t element);
  // The rank of the next header to read for an element; -1: all were read.
  int NextFile(const Array& array, int64_t element) const;
  std::string PathOf(int rank) const;

  std::string folder_;
  std::vector<Manifest::File> files_;
  std::map<Key, Array> arrays_;
  std::map<std::string, Cut> cuts_;  // by parameter
  std::vector<float> of_block_;
  // By rank: the rest of the headers that were read, without checksums.
  std::map<int, std::map<std::string, std::string>> read_;
  int near_ = 0;  // the file of the last piece
  struct Block {
    const Piece* piece = nullptr;
    int64_t number = 0;
    friend bool operator==(const Block&, const Block&) = default;

    int64_t first() const { return number * kCheckedBlock; }  // byte of the piece
    int64_t bytes() const { return std::min(kCheckedBlock, piece->bytes() - first()); }
  };
  // The values of elements of a piece of codes, which is as Read has it for other pieces.
  absl::Status ReadCodes(const Key& key, const Piece& piece, int64_t begin,
                         std::span<float> values);
  // Reads the scales of all blocks of the piece, which stay until those of another are read.
  absl::Status ReadScales(const Key& key, const Array& array, const Piece& piece);
  absl::Status Fetch(const Block& block);
  // Hands over bytes [begin, end) of the block in `values_`, part by part. An error follows if they
  // differ from the saved ones.
  absl::Status Take(const Block& block, int64_t begin, int64_t end,
                    absl::FunctionRef<void(int64_t begin, int64_t end)> show);
  absl::Status Check(const Block& block, uint64_t found) const;

  FileHandle file_;  // the last file that was read without reading ahead
  int open_rank_ = -1;
  std::vector<std::byte> unexpected_;
  std::vector<Block> expected_;  // the first `taken_` of them have been read
  size_t taken_ = 0;
  Block block_;  // the last block that was read and had its checksum
  optim::RunningChecksum sum_;
  std::span<const std::byte> values_;  // of it
  const Piece* of_scales_ = nullptr;
  std::vector<float> scales_;
  std::vector<std::byte> codes_;
  std::vector<float> decoded_;
  int64_t bytes_read_ = 0;
  std::unique_ptr<ReadAhead> ahead_;
};

}  // namespace ebb
