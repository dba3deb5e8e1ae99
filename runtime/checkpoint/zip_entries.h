// The places of a zip archive's entries in its file. Entries must be stored uncompressed, as
// torch.save stores them:
//
//   | local header, name, extra | data | ... | central directory | zip64 records | end record |
//
// An archive is untrusted. Sizes, offsets and overlaps are checked before a byte of an entry is
// used. Names are keys, never paths. CRCs are not checked, because torch can leave them out.
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

// The entries of an open file by name, read with pread. kDataLoss: the archive is incomplete.
// kInvalidArgument names an entry that is compressed or encrypted.
absl::StatusOr<std::map<std::string, ZipEntry>> ReadZipEntries(int descriptor,
                                                               std::string_view path);

}  // namespace ebb
