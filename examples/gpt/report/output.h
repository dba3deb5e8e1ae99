// Standard output, and the files that a run writes. Waiting for a pipe's reader is logged.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb::gpt {

// Writes all of it to standard output, at once. After an error nothing more is written.
void Print(std::string_view text);
// The first error of this process's output that grows while it trains, such as a full disk. A
// closed reader of standard output is not one: a signal reports it (stop.h).
absl::Status OutputError();
void KeepOutputError(const absl::Status& error);  // a file's

// A file that is written whole or not at all, or one that grows line by line. Opening proves,
// before hours of training, that it can be written. A file that is not regular (a pipe), and one
// that is a standard stream (/dev/stdout), is written directly.
class OutputFile {
 public:
  // A whole file: Write puts the contents beside it and renames them into place, so a process that
  // is killed before leaves nothing. `flag` names the option in messages.
  static absl::StatusOr<OutputFile> Open(std::string_view flag, const std::string& path);
  // A file that Append makes longer. Until then it stays as it is.
  static absl::StatusOr<OutputFile> OpenToAppend(std::string_view flag, const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();  // removes a whole file that was not written to its end, and an empty one

  // Again: other contents in place of the first.
  absl::Status Write(std::string_view contents);
  // All of it or, if the disk is full, nothing.
  absl::Status Append(std::string_view contents);
  absl::Status CutAt(int64_t bytes);
  absl::Status Sync();  // to the disk

  const std::string& path() const { return path_; }
  bool is_direct() const { return is_direct_; }

 private:
  OutputFile(std::string_view flag, const std::string& path) : flag_(flag), path_(path) {}
  absl::Status Failed(std::string_view action) const;  // with errno's text
  absl::Status MakeBeside();
  void Remove();  // the file beside or the one that is still empty, and the descriptor
  bool OpenDirectly();
  absl::Status WriteAll(std::string_view contents);

  std::string flag_, path_, temporary_;  // temporary: empty if there is none
  int descriptor_ = -1;
  bool is_direct_ = false;
};

}  // namespace ebb::gpt
