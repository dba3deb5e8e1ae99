// Writes a model as a folder of safetensors files that Hugging Face's loaders read: model.safetensors, or several files of
// at most so many bytes and their index. The folder has its name when all of it is on the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/checkpoint/streamed_file.h"
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class SafetensorsWriter {
 public:
  // `folder`: one that is not there yet, or empty. `tensors`: their names, shapes and dtypes, in the order in which
  // their values come. `file_bytes_max`: bytes of tensors; a larger tensor has a file of its own.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& folder, const std::vector<TensorInfo>& tensors, int64_t file_bytes_max);
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
  // Removes the written files, unless Finish has given the folder its name.
  ~SafetensorsWriter();

  // The next values; a call may be of a part of a tensor, not of several.
  absl::Status Append(std::span<const float> values);
  // A small file beside them, such as config.json.
  absl::Status AddFile(const std::string& name, std::string_view text);
  // When all values have come.
  absl::Status Finish();

 private:
  struct File {
    std::string name;
    SafetensorsHeader header;
  };
  SafetensorsWriter(std::string folder, std::string written)
      : folder_(std::move(folder)), written_(std::move(written)) {}
  void CutIntoFiles(const std::vector<TensorInfo>& tensors, int64_t file_bytes_max);
  // To the next tensor, and the file that it is in. Ends the file before.
  absl::Status NextTensor();
  absl::Status NextFile();

  const std::string folder_, written_;
  std::vector<File> files_;
  std::optional<StreamedFile> file_;  // the one under way
  size_t next_file_ = 0, tensor_ = 0;
  int64_t left_ = 0;  // elements of the tensor under way
  bool finished_ = false;
  std::vector<std::byte> narrow_;
  ThreadTeam caller_only_{1};
};

}  // namespace ebb
