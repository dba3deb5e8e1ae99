// The values of a checkpoint, whatever number of ranks wrote them: any interval of a parameter's masters or states, as
// fp32, from the files that hold it. Reads no more than the blocks that it needs and checks each against its checksum.
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
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/config/dtype.h"

namespace ebb {

class StoredValues {
 public:
  // Reads all headers and checks that they have each parameter and state of the manifest once, whole.
  // `rank`: whose own bytes are kept.
  static absl::StatusOr<StoredValues> Open(const std::string& checkpoint, const Manifest& manifest,
                                           int rank);
  StoredValues(StoredValues&&) = default;

  bool Has(const std::string& of, const std::string& parameter) const;
  // Elements [begin, begin + values.size()). From one thread at a time.
  absl::Status Read(const std::string& of, const std::string& parameter, int64_t begin,
                    std::span<float> values);
  // By Read so far, in whole blocks.
  int64_t bytes_read() const { return bytes_read_; }
  // What that rank of the run that saved has named in its file: SaveOptions::of_this_rank.
  const std::map<std::string, std::string>& of_this_rank() const { return of_this_rank_; }

 private:
  struct Piece {
    int rank = 0;
    int64_t begin = 0, end = 0;  // elements of the parameter
    int64_t at = 0;              // byte of the file
    DType dtype{};
    std::string sums;  // of its blocks
  };
  using Key = std::pair<std::string, std::string>;  // class, parameter

  StoredValues() = default;
  absl::Status AddFile(int rank, bool own);
  absl::Status CheckCoverage(const Manifest& manifest) const;
  // Into block_.
  absl::Status ReadBlock(const Piece& piece, int64_t block);
  std::string PathOf(int rank) const;

  std::string folder_;
  int ranks_ = 0;
  std::map<Key, std::vector<Piece>> pieces_;  // each list in the order of its elements
  std::map<std::string, std::string> of_this_rank_;
  FileHandle file_;  // the one that was read last
  int open_rank_ = -1;
  const Piece* block_piece_ = nullptr;  // whose block is in block_
  int64_t block_number_ = 0;
  std::vector<std::byte> block_;
  int64_t bytes_read_ = 0;
};

}  // namespace ebb
