// Files and folders of checkpoints. Links are not followed, reads and writes are complete, and a
// file is on the disk before it gets its name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"

namespace ebb {

// The system's error (errno) for an action on a file, with a remedy.
absl::Status FileError(std::string_view action, std::string_view path, int error);

// Whether the name is in use, by a file of any kind, also by a link.
bool IsThere(const std::string& path);
// Opens a regular file. A link, a device or a pipe is an error.
absl::StatusOr<FileHandle> OpenToRead(const std::string& path);
// The target of a link, because files in Hugging Face's cache are links. Any other path is returned
// unchanged.
std::string TargetOf(const std::string& path);
// The names of a folder's entries, in no order.
absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& folder);
// A name that no other process makes: 16 random hexadecimal digits.
std::string RandomName();
// Creates a file. An existing file is an error, because it belongs to another process.
absl::StatusOr<FileHandle> CreateFile(const std::string& path);
absl::StatusOr<int64_t> BytesOfRegularFile(int descriptor, std::string_view path);

// Reads the whole span. An error names the file and the byte.
absl::Status ReadAt(int descriptor, std::string_view path, int64_t offset,
                    std::span<std::byte> into);
absl::Status WriteAt(int descriptor, std::string_view path, int64_t offset,
                     std::span<const std::byte> from);

// From then on a file that grows beyond the limit of a file's size (ulimit -f) is an error of the
// calling thread and of those that it starts. Without this call the system's signal (SIGXFSZ) ends
// the process.
void BlockFileSizeSignal();

absl::Status SyncFile(int descriptor, std::string_view path);
absl::Status SyncFolder(const std::string& path);

// The text of a small file. A file of more than `bytes_max` bytes is an error.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path, int64_t bytes_max);
// Written beside `path`, synced and renamed: a reader finds the old text or the new one.
absl::Status ReplaceFile(const std::string& path, std::string_view text);

}  // namespace ebb
