#include "ebb/runtime/checkpoint/safetensors_writer.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/model_files.h"

namespace ebb {
namespace {

namespace fs = std::filesystem;

// Hugging Face's loaders refuse files that do not say so.
const std::map<std::string, std::string> kFormatMetadata = {{"format", "pt"}};
constexpr int64_t kAlignment = 64;

fs::path Named(const std::string& folder) {
  std::error_code error;
  const fs::path path = fs::absolute(folder, error).lexically_normal();
  return path.has_filename() ? path : path.parent_path();  // of "DIR/"
}

// The folder's name until all of it is on the disk.
std::string Unfinished(const fs::path& path) {
  return (path.parent_path() / absl::StrCat(".writing-", path.filename().string())).string();
}

// In `path`, or, where it does not exist, in the first folder above it that does.
absl::Status CanMakeFolders(fs::path path) {
  while (!IsThere(path.string()) && path.has_relative_path()) path = path.parent_path();
  struct stat at;
  if (stat(path.c_str(), &at) != 0) return FileError("making a folder in", path.string(), errno);
  if (!S_ISDIR(at.st_mode)) return FileError("making a folder in", path.string(), ENOTDIR);
  if (access(path.c_str(), W_OK | X_OK) != 0)
    return FileError("making a folder in", path.string(), errno);
  // Some file systems refuse what the rights allow. The name differs from those of other ranks.
  std::string tried = (path / ".writing-XXXXXX").string();
  if (mkdtemp(tried.data()) == nullptr)
    return FileError("making a folder in", path.string(), errno);
  rmdir(tried.c_str());
  return absl::OkStatus();
}

absl::Status BeingWritten(const fs::path& path) {
  return absl::AlreadyExistsError(
      absl::StrCat("'", Unfinished(path), "' exists: another program writes '", path.string(),
                   "', or was killed; if it was killed, remove '", Unfinished(path), "'"));
}

}  // namespace

absl::Status SafetensorsWriter::CheckFolder(const std::string& folder) {
  const fs::path path = Named(folder);
  std::error_code error;
  const fs::file_status there = fs::symlink_status(path, error);
  // A folder cannot take the name of a link or of a file.
  if (fs::exists(there) && !fs::is_directory(there))
    return absl::AlreadyExistsError(
        absl::StrCat("'", path.string(), "' is a link or a file: name a new folder"));
  if (fs::exists(there) && !fs::is_empty(path, error))
    return absl::AlreadyExistsError(
        absl::StrCat("'", path.string(), "' exists and is not empty: name a new folder"));
  EBB_RETURN_IF_ERROR(CanMakeFolders(path.parent_path()));
  // Another file system, mounted there, cannot be renamed.
  struct stat at, above;
  if (stat(path.c_str(), &at) == 0 && stat(path.parent_path().c_str(), &above) == 0 &&
      at.st_dev != above.st_dev)
    return absl::InvalidArgumentError(
        absl::StrCat("'", path.string(), "' is a mount point: name a new folder within it"));
  return IsThere(Unfinished(path)) ? BeingWritten(path) : absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& folder, const std::vector<TensorInfo>& tensors, int64_t file_bytes_max) {
  EBB_RETURN_IF_ERROR(CheckFolder(folder));
  const fs::path path = Named(folder);
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  const std::string written = Unfinished(path);
  if (mkdir(written.c_str(), 0777) != 0)
    return errno == EEXIST ? BeingWritten(path) : FileError("making the folder", written, errno);
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter(path.string(), written));
  writer->CutIntoFiles(tensors, file_bytes_max);
  EBB_RETURN_IF_ERROR(writer->NextFile());
  return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
  std::error_code error;
  if (!finished_) fs::remove_all(written_, error);
}

void SafetensorsWriter::CutIntoFiles(const std::vector<TensorInfo>& tensors,
                                     int64_t file_bytes_max) {
  files_.emplace_back();
  for (const TensorInfo& tensor : tensors) {
    const int64_t before = files_.back().header.data_bytes();
    if (before > 0 && before + tensor.elements() * SizeOf(tensor.dtype) > file_bytes_max)
      files_.emplace_back();
    files_.back().header.Add(tensor.name, tensor.dtype, tensor.shape);
  }
  for (size_t i = 0; i < files_.size(); ++i) {
    files_[i].name = files_.size() == 1
                         ? kSafetensorsFile
                         : absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, files_.size());
    files_[i].header.metadata = kFormatMetadata;
  }
}

absl::Status SafetensorsWriter::NextFile() {
  if (file_) EBB_RETURN_IF_ERROR(file_->Sync());
  file_.reset();
  if (next_file_ == files_.size()) return absl::OkStatus();
  const File& file = files_[next_file_++];
  EBB_ASSIGN_OR_RETURN(StreamedFile made,
                       StreamedFile::Create(absl::StrCat(written_, "/", file.name)));
  file_.emplace(std::move(made));
  const std::string prefix = SafetensorsPrefix(file.header, kAlignment);
  if (static_cast<int64_t>(prefix.size()) > kSafetensorsHeaderMax)
    return absl::ResourceExhaustedError(absl::StrCat(
        "'", file_->path(), "' would need a header of ", prefix.size(),
        " bytes; safetensors' limit is ", kSafetensorsHeaderMax, ": write smaller files"));
  file_->Expect(0, static_cast<int64_t>(prefix.size()) + file.header.data_bytes());
  EBB_RETURN_IF_ERROR(file_->Append(std::as_bytes(std::span(prefix))));
  tensor_ = 0;
  left_ = file.header.tensors.empty() ? 0 : Elements(file.header.tensors[0].shape);
  return left_ == 0 && !file.header.tensors.empty() ? NextTensor() : absl::OkStatus();
}

absl::Status SafetensorsWriter::NextTensor() {
  const std::vector<StoredTensor>& tensors = files_[next_file_ - 1].header.tensors;
  while (left_ == 0) {
    if (++tensor_ == tensors.size()) return NextFile();
    left_ = Elements(tensors[tensor_].shape);
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Append(std::span<const float> values) {
  const int64_t count = static_cast<int64_t>(values.size());
  if (!file_ || count > left_)
    return absl::InternalError(
        absl::StrCat("more values for '", written_, "' than its tensors have"));
  const DType dtype = *DTypeOfSafetensors(files_[next_file_ - 1].header.tensors[tensor_].dtype);
  EBB_RETURN_IF_ERROR(file_->Append(BytesAs(dtype, values, cast_)));
  left_ -= count;
  return left_ == 0 ? NextTensor() : absl::OkStatus();
}

absl::Status SafetensorsWriter::AddFile(const std::string& name, std::string_view text) {
  EBB_ASSIGN_OR_RETURN(StreamedFile file, StreamedFile::Create(absl::StrCat(written_, "/", name)));
  EBB_RETURN_IF_ERROR(file.Append(std::as_bytes(std::span(text))));
  return file.Sync();
}

absl::Status SafetensorsWriter::Finish() {
  if (left_ > 0 || next_file_ < files_.size())
    return absl::InternalError(absl::StrCat("'", written_, "' lacks values"));
  if (file_) EBB_RETURN_IF_ERROR(NextFile());  // there is no tensor
  if (files_.size() > 1) {
    std::map<std::string, std::string> file_of_tensor;
    int64_t bytes = 0;
    for (const File& file : files_) {
      for (const StoredTensor& tensor : file.header.tensors)
        file_of_tensor[tensor.name] = file.name;
      bytes += file.header.data_bytes();
    }
    EBB_RETURN_IF_ERROR(AddFile(kSafetensorsIndex, SafetensorsIndexText(file_of_tensor, bytes)));
  }
  EBB_RETURN_IF_ERROR(SyncFolder(written_));
  if (rename(written_.c_str(), folder_.c_str()) != 0) return FileError("naming", folder_, errno);
  finished_ = true;
  return SyncFolder(fs::path(folder_).parent_path().string());
}

}  // namespace ebb
