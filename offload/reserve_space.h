// Reserves a file's space before its first byte is needed, so that a disk that is too small shows
// before training and not in the middle of it.
#pragma once

#include <cstdint>
#include <string>

namespace ebb {

// Makes the file that is open as `descriptor` `bytes` long, with its space on the disk. The file is
// new and empty, or ends at `from`. What is added is zeros. Returns 0 or an errno (ENOSPC, EDQUOT);
// the file then may be shorter. `path` is for the log.
//
// Blocks as long as fallocate does. If fallocate is unknown (ext2, NFS before 4.2) or not allowed,
// the zeros are written to the disk, 64 MiB at a time. That takes as long as writing all of them,
// and is logged. If zeros take no space (a file system that compresses) nothing can be reserved,
// and a warning says so once.
int WaitReserved(int descriptor, int64_t bytes, const std::string& path, int64_t from = 0);

}  // namespace ebb
