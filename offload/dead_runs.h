// What runs leave in an nvme_path when they are killed, told from what living ones own: each run's
// directory holds a file that the run keeps locked, and the system drops the lock with the process.
//
//   mkdir .ebb-x     [  no lock: may be taken for dead  ]
//   lock .ebb-x/lock [  a living run's, never touched   ]
//   rename to ebb-x
//
// A cleaner cannot tell who is between the first two from who was killed there, so it removes the
// directory, which is empty, and a living run makes another.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"

namespace ebb {

inline constexpr char kRunPrefix[] = "ebb-";
inline constexpr char kNewRunPrefix[] = ".ebb-";  // until it is locked
// What is put in a swap directory has one of these names, or begins with one and '-'. Nothing else
// is removed. Engines make the first two, tests and benchmarks "shards".
inline constexpr std::string_view kSwapFileNames[] = {"parameters", "states", "shards"};

// A living run's. The directory stays open beside the lock, as the run may have used up all
// descriptors by the time it removes it.
struct RunLock {
  FileHandle directory, lock;
};
// Makes and locks the file in the new directory `leaf` of `parent`; `path` for messages. kAborted: a
// cleaner has removed the directory meanwhile.
absl::StatusOr<RunLock> MakeRunLock(int parent, const std::string& leaf, std::string_view path);

// Removes the dead runs' directories that are certainly that: named as ours to the last digit, of
// this user, private, no links, and with a lock that no process holds and that says what it is and who
// made it; or, where its process got no further, empty. On a file system that hosts share, a lock
// may not tell of other hosts: there only what this host has made since it was started.
void RemoveDeadRuns(int parent, std::string_view path);

// Removes the directory, which has the name `leaf`, and the swap files in it. Opens nothing and follows
// no link. Where others have put files beside them these stay, and so does the directory, which a
// warning says.
void RemoveRun(FileHandle directory, const std::string& leaf);

}  // namespace ebb
