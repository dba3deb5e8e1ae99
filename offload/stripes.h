// How a file is striped over several files, unit by unit in turn. Or how several files are joined
// end to end.
//
//   file 0: | 0 | 2 | 4 |     file 1: | 1 | 3 | 5 |      joined: | file 0 | file 1 |
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ebb {

class Stripes {
 public:
  struct Place {
    int file = 0;
    int64_t offset = 0;  // in that file
    int64_t bytes = 0;   // to the end of the unit; one file, or joined: to that of the file
  };

  // The unit is at least 1 MiB, in whole blocks.
  Stripes(int files, int64_t bytes, int64_t block_bytes);
  // Joins files of these sizes, each in whole blocks.
  static Stripes Joined(std::span<const int64_t> sizes);

  Place PlaceOf(int64_t offset) const;
  int64_t FileBytes(int file) const;
  int64_t bytes() const { return bytes_; }

 private:
  int64_t files_;
  int64_t bytes_;
  int64_t unit_bytes_;
  std::vector<int64_t> ends_;  // of joined files
};

}  // namespace ebb
