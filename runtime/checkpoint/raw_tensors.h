// The tensors of safetensors files, and of other files with plain arrays of fp32, bf16 or fp16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

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
  ThreadTeam caller_only_{1};
};

}  // namespace ebb
