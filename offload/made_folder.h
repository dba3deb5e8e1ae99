// An nvme_path that did not exist: it is made for the runs that swap to it, is private, and the
// last of these runs removes it. Its mode, 1700, marks it as made here: a sticky bit has no effect
// on a private directory.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace ebb {

// Makes the directory and its parents, as far as they do not exist.
absl::Status MakeFolder(const std::string& path);

// Removes a directory that MakeFolder has made, and its parents made likewise, as long as they are
// empty. Opens nothing and follows no link at the end of the path.
void RemoveMadeFolder(std::string path);

}  // namespace ebb
