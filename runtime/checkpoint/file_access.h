// Files and folders as a checkpoint uses them: opened without following links, read and written in full,
// on the disk before they have their name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"

namespace ebb {

// What the system says (errno) of an action on a file, and what to do.
absl::Status FileError(std::string_view action, std::string_view path, int error);

// Whether the name is in use, by a file of any kind, also by a link.
bool IsThere(const std::string& path);
// The size of an existing regular file. A link, a device or a pipe is an error.
absl::StatusOr<FileHandle> OpenToRead(const std::string& path);
// Where a link leads, as files in Hugging Face's cache are links; any other path as it is.
std::string TargetOf(const std::string& path);
// A new file. One that is there already is another process's, and an error.
absl::StatusOr<FileHandle> CreateFile(const std::string& path);
absl::StatusOr<int64_t> BytesOfRegularFile(int descriptor, std::string_view path);

// All of the span, or an error that names the file and the byte.
absl::Status ReadAt(int descriptor, std::string_view path, int64_t offset,
                    std::span<std::byte> into);
absl::Status WriteAt(int descriptor, std::string_view path, int64_t offset,
                     std::span<const std::byte> from);

absl::Status SyncFile(int descriptor, std::string_view path);
absl::Status SyncFolder(const std::string& path);

// A small file, at most `bytes_max`; a larger one is an error.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path, int64_t bytes_max);
// Written beside `path`, synced and renamed: a reader finds the old text or the new one.
absl::Status ReplaceFile(const std::string& path, std::string_view text);

}  // namespace ebb
