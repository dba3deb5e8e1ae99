// An nvme_path that is not there: made for the runs that swap to it, private, and removed again by the
// last of them. What was made here is known by its mode, 1700, which has a sticky bit that means nothing
// to a directory of one user alone.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace ebb {

// Makes the directory and what it lies in, as far as they are not there.
absl::Status MakeFolder(const std::string& path);

// Removes a directory that MakeFolder has made, and those that it lies in, as long as they are empty.
// Opens nothing and follows no link at the end of the path.
void RemoveMadeFolder(std::string path);

}  // namespace ebb
