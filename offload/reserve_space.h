// Space for a file, taken before its first byte is needed: a disk that is too small is found before training, not in
// the middle of it.
#pragma once

#include <cstdint>
#include <string>

namespace ebb {

// Makes the file that is open as `descriptor` `bytes` long, with its space on the disk: a new, empty one, or one that ends
// at `from`. What is added is zeros. Returns 0, or what errno says of the failure (ENOSPC, EDQUOT); the file then is as
// long as it got. `path` is for the log.
//
// Blocks as long as fallocate does. Where that is not known (ext2, NFS before 4.2) or not allowed, the zeros are written
// down to the disk, by 64 MiB at a time: as long as writing all of it takes, with lines in the log. Where zeros take no
// space (a file system that compresses) nothing can be reserved, and a warning says so once.
int WaitReserved(int descriptor, int64_t bytes, const std::string& path, int64_t from = 0);

}  // namespace ebb
