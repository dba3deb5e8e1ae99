// The values of a checkpoint of any number of ranks: any interval of a parameter's masters or
// states, as fp32. Reads only the blocks that it needs and checks each against its checksum.
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
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/read_ahead.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/runtime/config/io_backend.h"

namespace ebb {

class StoredValues {
 public:
  // Reads all headers and checks that they have every element of each parameter and state exactly
  // once. `rank`: keeps the entries of this rank's file (of_this_rank).
  static absl::StatusOr<StoredValues> Open(const std::string& checkpoint, const Manifest& manifest,
                                           int rank);
  StoredValues(StoredValues&&) = default;

  bool Has(const std::string& of, const std::string& parameter) const;
  // Reads these intervals ahead, for later calls of Read in this order. `memory`: as for ReadAhead.
  // Read also takes other intervals, without reading ahead.
  struct Interval {
    std::string of, parameter;
    int64_t begin = 0, end = 0;  // elements
  };
  absl::Status Expect(std::span<const Interval> intervals, IoBackend backend,
                      std::span<std::byte> memory = {});
  // Elements [begin, begin + values.size()). From one thread at a time. After an error they are
  // undefined.
  absl::Status Read(const std::string& of, const std::string& parameter, int64_t begin,
                    std::span<float> values);
  // The bytes that Read has read so far, in whole blocks.
  int64_t bytes_read() const { return bytes_read_; }
  // SaveOptions::of_this_rank of the rank with this number in the run that saved.
  const std::map<std::string, std::string>& of_this_rank() const { return of_this_rank_; }

 private:
  struct Piece {
    int rank = 0;
    int64_t begin = 0, end = 0;  // elements of the parameter
    int64_t at = 0;              // byte of the file
    DType dtype{};
    std::string sums;  // of its blocks

    int64_t bytes() const { return (end - begin) * SizeOf(dtype); }
  };
  using Key = std::pair<std::string, std::string>;  // class, parameter

  StoredValues() = default;
  absl::Status AddFile(int rank, bool own);
  absl::Status CheckCoverage(const Manifest& manifest) const;
  std::string PathOf(int rank) const;

  std::string folder_;
  int ranks_ = 0;
  std::map<Key, std::vector<Piece>> pieces_;  // each list in the order of its elements
  std::map<std::string, std::string> of_this_rank_;
  struct Block {
    const Piece* piece = nullptr;
    int64_t number = 0;
    friend bool operator==(const Block&, const Block&) = default;

    int64_t first() const { return number * kCheckedBlock; }  // byte of the piece
    int64_t bytes() const { return std::min(kCheckedBlock, piece->bytes() - first()); }
  };
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
  int64_t bytes_read_ = 0;
  std::unique_ptr<ReadAhead> ahead_;
};

}  // namespace ebb
