#include "ebb/runtime/checkpoint/tensor_source.h"

#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/checkpoint/checkpoint_source.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/model_files.h"
#include "ebb/runtime/checkpoint/universal_folder.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<TensorSource>> OpenTensorSource(const std::string& path) {
  struct stat what = {};
  if (stat(path.c_str(), &what) != 0) return FileError("opening", path, errno);
  if (!S_ISDIR(what.st_mode) || HasModelFiles(path)) return OpenModelFiles(path);
  if (HasUniversalFolder(path)) return OpenUniversalFolder(path);
  if (LooksLikeDeepSpeed(path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", path,
        "' is a checkpoint that a run of DeepSpeed saved. Ebb does not read it: convert it "
        "with deepspeed/checkpoint/ds_to_universal.py, and name the new folder"));
  }
  auto checkpoint = OpenCheckpointSource(path);
  if (!absl::IsNotFound(checkpoint.status())) return checkpoint;
  return absl::NotFoundError(absl::StrCat("'", path, "' has no checkpoint of Ebb (step-*), no ",
                                          kSafetensorsFile,
                                          ", no pytorch_model.bin, and no index of either"));
}

bool HasCheckpoints(const std::string& path) {
  return !HasModelFiles(path) && !HasUniversalFolder(path) && !LooksLikeDeepSpeed(path) &&
         CandidatesIn(path).ok();
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::string Described(const TensorInfo& tensor) {
  return tensor.state.empty() ? absl::StrCat("'", tensor.name, "'")
                              : absl::StrCat(tensor.state, " of '", tensor.name, "'");
}

}  // namespace ebb
