// A file of torch.save: a zip archive with a pickle and the bytes of tensors.
//
//   fp32/data.pkl       {"param": tensor of storage "0"}
//   fp32/byteorder      "little"
//   fp32/data/0         the storage: numbers end to end
//
// A file is untrusted. The pickle is read as values (pickle.h) and not executed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/checkpoint/pickle.h"
#include "ebb/runtime/checkpoint/zip_entries.h"
#include "ebb/runtime/config/dtype.h"

namespace ebb {

struct TorchTensor {
  std::string storage = {};         // torch's class, such as "torch.LongStorage"
  std::optional<DType> dtype = {};  // nothing: parameters cannot have such numbers
  std::vector<int64_t> shape = {};
  int64_t at =
      0;  // byte of the file at which the first element lies; the others follow in row-major order
};

// The globals that the pickle of a file may name.
enum class TorchGlobals : uint8_t {
  kOfTensors,  // functions and classes that make up tensors and dicts; any other is an error
  kAny         // also those of other objects; they stay names
};

class TorchFile {
 public:
  // Reads the directory and the pickle. kInvalidArgument names an unsupported feature. kDataLoss:
  // the file is damaged.
  static absl::StatusOr<TorchFile> Open(const std::string& path, TorchGlobals globals);
  // Reads an open file; `path` is for messages.
  static absl::StatusOr<TorchFile> Read(FileHandle file, const std::string& path,
                                        TorchGlobals globals);
  TorchFile(TorchFile&&) = default;

  const std::string& path() const { return path_; }
  const Pickle& pickle() const { return pickle_; }

  static bool IsTensor(const PickleValue& value);
  // The place of a tensor of the pickle. `name`: its name in messages.
  absl::StatusOr<TorchTensor> TensorOf(const PickleValue& value, std::string_view name) const;
  // A number: the pickle's own, or a tensor's only element.
  absl::StatusOr<double> NumberOf(const PickleValue& value, std::string_view name) const;
  // A tuple, a list or a torch.Size of integers that are not negative.
  absl::StatusOr<std::vector<int64_t>> SizesOf(const PickleValue& value,
                                               std::string_view name) const;

 private:
  TorchFile(std::string path, FileHandle file, std::map<std::string, ZipEntry> entries,
            std::string folder, Pickle pickle);
  absl::Status Refuse(std::string_view name, std::string_view what) const;
  absl::Status Damaged(std::string_view name, std::string_view what) const;

  std::string path_;
  FileHandle file_;
  std::map<std::string, ZipEntry> entries_;
  std::string folder_;  // of the archive's entries
  Pickle pickle_;
};

// Whether the file begins like a file of torch.save, now or before torch 1.6.
bool LooksLikeTorchFile(const std::string& path);

}  // namespace ebb
