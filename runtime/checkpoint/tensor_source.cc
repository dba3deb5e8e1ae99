#include "ebb/runtime/checkpoint/tensor_source.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/checkpoint/checkpoint_tensors.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/model_files.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

// Whether it is a checkpoint that a run of DeepSpeed saved, or a folder of such checkpoints.
bool LooksLikeDeepSpeed(const std::string& path) {
  if (IsThere(absl::StrCat(path, "/zero_to_fp32.py"))) return true;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error))
    if (entry->path().string().ends_with("_optim_states.pt")) return true;
  return false;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TensorSource>> OpenTensorSource(const std::string& path) {
  struct stat what = {};
  if (stat(path.c_str(), &what) != 0) return FileError("opening", path, errno);
  if (IsForTorch(path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", path,
        "' has files of torch.save, which only ebb-checkpoint reads: make a checkpoint "
        "of it with ebb-checkpoint import '",
        path, "' DIR, and name DIR"));
  }
  if (!S_ISDIR(what.st_mode) || HasModelFiles(path)) return OpenModelFiles(path);
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
  return !HasModelFiles(path) && !IsForTorch(path) && !LooksLikeDeepSpeed(path) &&
         CandidatesIn(path).ok();
}

absl::Status ForEachPiece(TensorSource& source, TensorSink sink) {
  constexpr int64_t kPieceElements = int64_t{16} << 20;
  std::vector<float> values;
  for (size_t tensor = 0; tensor < source.tensors().size(); ++tensor) {
    const int64_t elements = source.tensors()[tensor].elements();
    for (int64_t begin = 0; begin < elements; begin += kPieceElements) {
      values.resize(static_cast<size_t>(std::min(kPieceElements, elements - begin)));
      EBB_RETURN_IF_ERROR(source.Read(tensor, begin, values));
      EBB_RETURN_IF_ERROR(sink(tensor, values));
    }
  }
  return absl::OkStatus();
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::string Described(const TensorInfo& tensor) {
  return tensor.state.empty() ? absl::StrCat("'", tensor.name, "'")
                              : absl::StrCat(tensor.state, " of '", tensor.name, "'");
}

}  // namespace ebb
