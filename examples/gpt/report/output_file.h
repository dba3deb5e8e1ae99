// A file that is written whole or not at all. Open proves, before hours of training, that it can be
// written. Write puts the contents beside it and renames them into place. A file that is not
// regular (/dev/stdout, a pipe) is written directly; waiting for a pipe's reader is logged.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb::gpt {

class OutputFile {
 public:
  // `flag` names the option in messages.
  static absl::StatusOr<OutputFile> Open(std::string_view flag, const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();  // removes a file that was not written to its end

  absl::Status Write(std::string_view contents);
  // Replaces the written contents by others; a device or a pipe keeps what it got.
  absl::Status Replace(std::string_view contents) const;
  const std::string& path() const { return path_; }

 private:
  OutputFile(std::string flag, std::string path, std::string temporary, int descriptor);
  absl::Status Failed(std::string_view action) const;  // with errno's text
  void OpenDirectly();
  void AwaitReader() const;

  std::string flag_, path_, temporary_;  // temporary: empty if written directly
  int descriptor_ = -1;
  bool is_direct_ = false;
};

}  // namespace ebb::gpt
