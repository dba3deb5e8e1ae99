// The parts of ebb-checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

// Exit statuses: kOther for diff, kDamaged for all commands.
inline constexpr int kDone = 0, kOther = 1, kDamaged = 1, kUsageError = 2;

// The commands print their result and return the exit status.
struct InspectOptions {
  std::string path;
  bool verify = true;  // read all values, and check them
};
absl::StatusOr<int> Inspect(const InspectOptions& options);

// Prints the tensors, shapes and values that differ between two sources.
absl::StatusOr<int> Diff(const std::string& a, const std::string& b);

// Opens what OpenTensorSource opens, and a path for which IsForTorch holds. Files of torch.save are
// pickles, which torch itself has to read:
//
//   ebb-checkpoint -> python3 -m ebb.checkpoint PATH -> a line of JSON: names, shapes, and the place
//                                                       of each tensor in its file
//
// The values are read here, as of any other file. An error of python3 says what to install.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenAnySource(const std::string& path);

// A command's progress, on one line of standard error. It prints only on a terminal.
class ProgressBar {
 public:
  ProgressBar(std::string what, int64_t total);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  // Wipes the line.
  ~ProgressBar();
  void Add(int64_t done);

 private:
  const std::string what_;
  const int64_t total_;
  const bool terminal_;
  int64_t done_ = 0;
  int shown_ = -1;  // per mille
};

}  // namespace ebb
