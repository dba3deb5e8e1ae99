// Finds and removes the swap directories of killed runs in an nvme_path. Each run's directory has a
// file that the run keeps locked. The system drops the lock when the process ends.
//
//   mkdir .ebb-x     [  no lock: looks like a dead run  ]
//   lock .ebb-x/lock [  a living run's, never touched   ]
//   rename to ebb-x
//
// Between mkdir and lock a living run looks like a killed one. So a cleaner removes the directory,
// which is empty, and a living run makes another.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"

namespace ebb {

inline constexpr char kRunPrefix[] = "ebb-";
inline constexpr char kNewRunPrefix[] = ".ebb-";  // until it is locked
// Every file in a swap directory has one of these names, or begins with one and '-'. No other file
// is removed. Engines make the first two, tests and benchmarks "shards".
inline constexpr std::string_view kSwapFileNames[] = {"parameters", "states", "shards"};

// Held by a living run. The directory stays open beside the lock, because the run may have no
// descriptor left when it removes the directory.
struct RunLock {
  FileHandle directory, lock;
};
// Makes and locks the file in the new directory `leaf` of `parent`. `path` is for messages.
// kAborted: a cleaner removed the directory before.
absl::StatusOr<RunLock> MakeRunLock(int parent, const std::string& leaf, std::string_view path);

// Removes the directories of dead runs. Such a directory has a name of exactly our form, belongs to
// this user, is private and is not a link. It has an unlocked lock file that names its maker, or it
// is empty, because its process was killed earlier. On a file system that hosts share, locks of
// other hosts may be invisible. There it removes only directories that this host has made since its
// start.
void RemoveDeadRuns(int parent, std::string_view path);

// Removes the directory, which has the name `leaf`, and the swap files in it. Opens no file and
// follows no link. If the directory has other files, it stays with them, and a warning says so.
void RemoveRun(FileHandle directory, const std::string& leaf);

}  // namespace ebb
