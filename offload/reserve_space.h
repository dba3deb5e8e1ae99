// Reserves a file's space before its first use, so that a disk that is too small is an error before
// training.
#pragma once

#include <cstdint>
#include <string>

namespace ebb {

// Makes the file that is open as `descriptor` `bytes` long, with its space on the disk. The file is
// new and empty, or ends at `from`. Added bytes are zeros. Returns 0 or an errno (ENOSPC, EDQUOT);
// after an error the file may be shorter. `path` is for the log.
//
// Blocks as long as fallocate does. If fallocate is unknown (ext2, NFS before 4.2) or not allowed,
// zeros are written to the disk, 64 MiB at a time, and the log says so. If zeros take no space (a
// file system that compresses), no space can be reserved, and a warning says so once.
int WaitReserved(int descriptor, int64_t bytes, const std::string& path, int64_t from = 0);

}  // namespace ebb
