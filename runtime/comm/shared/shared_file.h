// A file that exists in memory only. Processes map it to share its pages. It has no name, or a name
// that is removed once all have opened it. Pages that are added later need no name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/participant.h"
#include "ebb/runtime/comm/rendezvous/socket.h"

namespace ebb {

// Pages of a file in this process's memory, until this object ends. No pages: memory of another
// owner.
class Mapping {
 public:
  Mapping() = default;
  Mapping(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();

  std::byte* data() const { return data_; }
  // Keeps the pages mapped for good.
  std::byte* Keep() && { return std::exchange(data_, nullptr); }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

class SharedFile {
 public:
  explicit SharedFile(Descriptor file) : file_(std::move(file)) {}
  // Nothing if the kernel does not allow it.
  static std::optional<SharedFile> CreateNameless();
  // Private to this user, and new. kAlreadyExists: the name is taken.
  static absl::StatusOr<SharedFile> Create(std::string_view name);
  static absl::StatusOr<SharedFile> Open(std::string_view name);
  static void RemoveName(std::string_view name);

  // Allocates the pages, filled with zeros, so that no later access can fail. kResourceExhausted
  // says how much is missing where.
  absl::Status Reserve(int64_t offset, int64_t bytes);
  // Frees pages that no rank will touch any more.
  void Release(int64_t offset, int64_t bytes);
  absl::StatusOr<Mapping> Map(int64_t offset, int64_t bytes) const;
  int descriptor() const { return file_.get(); }

 private:
  Descriptor file_;
};

// Another process of this host opens a file without a name from the open files of its owner.
// Nothing of the file stays behind, whichever process is killed.
namespace shared {

// What other processes need to open this process's `file`.
std::string PackFile(int file);

// The file that `owner` has packed. Not open if a container hides processes from each other, or
// `owner`'s process id belongs to another process here.
Descriptor OpenPeerFile(const Participant& owner, std::string_view packed, int flags);

}  // namespace shared

}  // namespace ebb
