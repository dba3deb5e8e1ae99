#include "ebb/runtime/checkpoint/tensor_source.h"

#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint_tensors.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/model_files.h"

namespace ebb {
namespace {

// Whether it is a checkpoint that a run of DeepSpeed saved, or a folder of such checkpoints.
bool LooksLikeDeepSpeed(const std::string& path) {
  if (IsThere(absl::StrCat(path, "/zero_to_fp32.py"))) return true;
  const auto names = NamesIn(path).value_or(std::vector<std::string>());
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& name) { return name.ends_with("_optim_states.pt"); });
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

absl::StatusOr<TensorDifference> Compare(TensorSource& a, size_t of_a, TensorSource& b, size_t of_b,
                                         absl::FunctionRef<void(int64_t elements)> progress) {
  constexpr int64_t kPieceElements = int64_t{1} << 20;
  TensorDifference difference;
  std::vector<float> x, y;
  const int64_t elements = a.tensors()[of_a].elements();
  for (int64_t begin = 0; begin < elements; begin += kPieceElements) {
    x.resize(static_cast<size_t>(std::min(kPieceElements, elements - begin)));
    y.resize(x.size());
    EBB_RETURN_IF_ERROR(a.Read(of_a, begin, x));
    EBB_RETURN_IF_ERROR(b.Read(of_b, begin, y));
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::bit_cast<uint32_t>(x[i]) == std::bit_cast<uint32_t>(y[i])) continue;
      ++difference.elements;
      const double distance = std::fabs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
      if (distance > difference.most) difference.most = distance;
    }
    progress(std::ssize(x));
  }
  return difference;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::string Misfit(const ParameterSpec& parameter, const std::vector<int64_t>& shape, DType dtype) {
  const auto misfit = [&](std::string_view is, const std::string& there, const std::string& here) {
    return absl::StrCat("'", parameter.name, "' ", std::string(is), " ", there, " there and ", here,
                        " in the model");
  };
  if (shape != WholeShape(parameter))
    return misfit("has the shape", ShapeText(shape), ShapeText(WholeShape(parameter)));
  const bool bytes = dtype == DType::kInt8;
  if (bytes == (parameter.compute == DType::kInt8)) return "";
  return misfit("is", bytes ? "bytes" : "numbers", bytes ? "numbers" : "bytes");
}

std::string DifferencesText(const std::vector<std::string>& differences) {
  const size_t shown = std::min<size_t>(differences.size(), 5);
  const std::string text =
      absl::StrJoin(differences.begin(), differences.begin() + static_cast<int64_t>(shown), "; ");
  if (shown == differences.size()) return text;
  return absl::StrCat(text, "; and ", differences.size() - shown, " differences more");
}

std::string Described(const TensorInfo& tensor) {
  return tensor.state.empty() ? absl::StrCat("'", tensor.name, "'")
                              : absl::StrCat(tensor.state, " of '", tensor.name, "'");
}

}  // namespace ebb
