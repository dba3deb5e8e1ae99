// Where the entries of a zip archive lie in its file, for archives that store them as they are, as torch.save does:
//
//   | local header, name, extra | data | ... | central directory | zip64 record and locator | end record |
//
// An archive may come from anywhere. Sizes, offsets and overlaps are checked before a byte of an entry is used. Names are
// keys, never paths. CRCs are not looked at: torch can leave them out.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace ebb {

struct ZipEntry {
  int64_t begin = 0, bytes = 0;  // of the data, in the file
};

// The entries of an open file by name, read with pread. kDataLoss: the archive is incomplete. kInvalidArgument: an
// entry is compressed or encrypted, with its name.
absl::StatusOr<std::map<std::string, ZipEntry>> ReadZipEntries(int descriptor,
                                                               std::string_view path);

}  // namespace ebb
