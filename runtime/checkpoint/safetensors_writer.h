// Writes a model as a folder of safetensors files for Hugging Face's loaders: model.safetensors, or
// several files of limited size and their index. The folder gets its name when all of it is on the
// disk.
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

namespace ebb {

class SafetensorsWriter {
 public:
  // Whether Create can make files for `folder`. Call it before long work.
  static absl::Status CheckFolder(const std::string& folder);
  // `folder`: a new or empty folder. `tensors`: names, shapes and dtypes, in the order of the
  // values. `file_bytes_max`: bytes of a file's tensors; a larger tensor has a file of its own.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& folder, const std::vector<TensorInfo>& tensors, int64_t file_bytes_max);
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
  // Removes the written files, unless Finish has given the folder its name.
  ~SafetensorsWriter();

  // Appends the next values. A call has values of one tensor.
  absl::Status Append(std::span<const float> values);
  // A small file beside them, such as config.json.
  absl::Status AddFile(const std::string& name, std::string_view text);
  // Call it after all values.
  absl::Status Finish();

 private:
  struct File {
    std::string name;
    SafetensorsHeader header;
  };
  SafetensorsWriter(std::string folder, std::string written)
      : folder_(std::move(folder)), written_(std::move(written)) {}
  void CutIntoFiles(const std::vector<TensorInfo>& tensors, int64_t file_bytes_max);
  // Goes to the next tensor and to its file. Ends the file before.
  absl::Status NextTensor();
  absl::Status NextFile();

  const std::string folder_, written_;
  std::vector<File> files_;
  std::optional<StreamedFile> file_;  // the one under way
  size_t next_file_ = 0, tensor_ = 0;
  int64_t left_ = 0;  // elements of the tensor under way
  bool finished_ = false;
  std::vector<std::byte> cast_;
};

}  // namespace ebb
