// An nvme_path that did not exist. It is made private for the runs that swap to it, and the last of
// these runs removes it. The mode 1700 marks such a folder, because a sticky bit has no effect on a
// private directory.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace ebb {

// Makes the directory and its parents, if they do not exist.
absl::Status MakeFolder(const std::string& path);

// Removes an empty directory that MakeFolder has made, and such parents. Opens no file and follows
// no link at the end of the path.
void RemoveMadeFolder(std::string path);

}  // namespace ebb
