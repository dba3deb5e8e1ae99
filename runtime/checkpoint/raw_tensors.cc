#include "ebb/runtime/checkpoint/raw_tensors.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr size_t kReadBytes = size_t{4} << 20;

}  // namespace

void RawTensors::Add(TensorInfo tensor, int64_t at) {
  tensors_.push_back(std::move(tensor));
  places_.push_back({.file = paths_.size() - 1, .at = at});
}

absl::Status RawTensors::Read(size_t tensor, int64_t begin, std::span<float> values) {
  const TensorInfo& info = tensors_[tensor];
  const Place& place = places_[tensor];
  if (begin < 0 || begin + static_cast<int64_t>(values.size()) > info.elements())
    return absl::InvalidArgumentError(absl::StrCat("values beyond the end of ", Described(info)));
  const std::string& path = paths_[place.file];
  if (open_ != place.file) {
    open_ = kNone;
    EBB_ASSIGN_OR_RETURN(file_, OpenToRead(path));
    open_ = place.file;
  }
  const int64_t size = SizeOf(info.dtype);
  int64_t at = place.at + begin * size;
  if (info.dtype == DType::kFloat32)
    return ReadAt(file_.get(), path, at, std::as_writable_bytes(values));
  while (!values.empty()) {
    const size_t count = std::min(values.size(), kReadBytes / static_cast<size_t>(size));
    cast_.resize(count * static_cast<size_t>(size));
    EBB_RETURN_IF_ERROR(ReadAt(file_.get(), path, at, cast_));
    optim::Cast(caller_only_, cast_.data(), info.dtype, values.data(), DType::kFloat32,
                static_cast<int64_t>(count), optim::Rounding::kNearest);
    values = values.subspan(count);
    at += static_cast<int64_t>(cast_.size());
  }
  return absl::OkStatus();
}

}  // namespace ebb
