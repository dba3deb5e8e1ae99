// A model in Hugging Face's files: one file, or several files and an index.
//
//   DIR/model.safetensors
//   DIR/model.safetensors.index.json
//       {"metadata": ..., "weight_map": {"h.0.ln_1.weight": "model-00001-of-00002.safetensors", ...}}
//
// Files and index are untrusted. Names in an index must be plain names of files in that folder, not
// links.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

inline constexpr char kSafetensorsFile[] = "model.safetensors";
inline constexpr char kSafetensorsIndex[] = "model.safetensors.index.json";

inline constexpr int64_t kIndexBytesMax = 100'000'000;

// Tensors of files: plain arrays of fp32, bf16 or fp16, or bytes.
class RawTensors : public TensorSource {
 public:
  explicit RawTensors(SourceDescription description) { description_ = std::move(description); }

  // The file of the tensors that are added next. It is opened again to read them.
  void BeginFile(std::string path) { paths_.push_back(std::move(path)); }
  // The tensor lies from byte `at` of the file on, in row-major order.
  void Add(TensorInfo tensor, int64_t at);
  void LeaveOut(const std::string& name, std::string why) {
    description_.left_out.push_back({.name = name, .why = std::move(why)});
  }
  void SetState(const TrainingState& state) { description_.state = state; }

  absl::Status Read(size_t tensor, int64_t begin, std::span<float> values) override;

 private:
  struct Place {
    size_t file = 0;
    int64_t at = 0;  // byte of it
  };
  static constexpr size_t kNone = ~size_t{0};

  std::vector<Place> places_;  // of tensors_
  std::vector<std::string> paths_;
  size_t open_ = kNone;
  FileHandle file_;
  std::vector<std::byte> cast_;
};

// The file of each tensor in an index. `path` is for messages.
absl::StatusOr<std::map<std::string, std::string>> ParseModelIndex(const std::string& text,
                                                                   const std::string& path);
std::string SafetensorsIndexText(const std::map<std::string, std::string>& file_of_tensor,
                                 int64_t tensor_bytes);

// Whether the folder has one of these two files.
bool HasModelFiles(const std::string& folder);
// Whether only torch can read the path: a file of torch.save, or a folder with pytorch_model.bin,
// its index, or a universal checkpoint of DeepSpeed, and without safetensors files.
bool IsForTorch(const std::string& path);
// The text of config.json in the folder, or beside the file; empty if there is none. In Hugging
// Face's cache it is a link.
absl::StatusOr<std::string> ModelConfigBeside(const std::string& path);
// Opens a safetensors file or such a folder. If a folder has one file and an index, the file is
// read, as by transformers. Only fp32, bf16 and fp16 tensors are read.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenModelFiles(const std::string& path);
// Tensors in files of torch.save. These are pickles, which torch itself has to read: `line` is what
// `python3 -m ebb.checkpoint PATH` prints, JSON with names, shapes, and the place of each tensor in
// its file. If it is an error there, it is the error here. kUnimplemented: the line is not of this
// version of the package.
absl::StatusOr<std::unique_ptr<TensorSource>> DescribedTensors(const std::string& line);

}  // namespace ebb
