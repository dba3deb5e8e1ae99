#include "data/data_files.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "status_macros.h"

namespace ebb::gpt {

size_t DataFiles::Add(const TextFile& file) {
  known_.push_back({.path = file.path(), .version = file.version()});
  return known_.size() - 1;
}

absl::Status DataFiles::ReadAt(size_t file, int64_t begin, std::span<uint8_t> bytes) {
  GPT_ASSIGN_OR_RETURN(const std::shared_ptr<const TextFile> opened, Get(file));
  return opened->ReadAt(begin, bytes);
}

std::shared_ptr<const TextFile> DataFiles::Find(size_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(opened_.begin(), opened_.end(),
                                  [&](const Opened& o) { return o.number == number; });
  if (found == opened_.end()) return nullptr;
  std::rotate(found, found + 1, opened_.end());
  return opened_.back().file;
}

absl::StatusOr<std::shared_ptr<const TextFile>> DataFiles::Get(size_t number) {
  if (std::shared_ptr<const TextFile> open = Find(number)) return open;
  // Reads without the lock, so that only this thread waits if the folder is slow.
  const Known& known = known_[number];
  GPT_ASSIGN_OR_RETURN(TextFile file, TextFile::Open(known.path));
  if (file.version() != known.version) {
    return absl::DataLossError(absl::StrCat("--data ", known.path,
                                            ": was replaced or changed since it had ",
                                            known.version.size, " bytes when training began"));
  }
  const auto shared = std::make_shared<const TextFile>(std::move(file));
  const std::lock_guard lock(mutex_);
  if (opened_.size() >= kOpenMax) opened_.erase(opened_.begin());
  opened_.push_back({.number = number, .file = shared});
  return shared;
}

}  // namespace ebb::gpt
