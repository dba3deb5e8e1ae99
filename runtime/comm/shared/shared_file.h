// Files that the processes of a host open of each other: the file of pages that all share, which
// rank 0 makes, and the heap of each. Another process opens a file without a name from the open
// files of its owner, so nothing of it stays behind, whichever process is killed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/rendezvous/socket.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"

namespace ebb {

// Pages of a file in this process's memory, until this object ends. No pages: memory of another
// owner.
class Mapping {
 public:
  Mapping() = default;
  Mapping(std::byte* data, size_t bytes) : data_(data, Unmap{bytes}) {}

  std::byte* data() const { return data_.get(); }
  // Keeps the pages mapped for good.
  std::byte* Keep() && { return data_.release(); }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Unmap> data_;
};

// A file that exists in memory only. Processes map it to share its pages. The file has no name, or
// a name that is removed once all have opened it. Pages that are added later need no name.
class SharedFile {
 public:
  explicit SharedFile(Descriptor file) : file_(std::move(file)) {}
  // Private to this user, and new. An empty name: no name. kAlreadyExists: the name is taken.
  static absl::StatusOr<SharedFile> Create(std::string_view name);

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

namespace shared {

// Rank 0's file, after `fill` has run on it there, open on all ranks. It has no name, so that no
// file stays behind even if all ranks are killed. If ranks may not look into each other's processes
// it has this name while this function runs. Every rank calls it.
absl::StatusOr<SharedFile> ShareFile(StoreGroup& ranks, const std::string& name,
                                     double timeout_seconds,
                                     absl::FunctionRef<absl::Status(SharedFile& file)> fill);

// The name that the file then has.
std::string SharedFileName(const Rendezvous& rendezvous);

// Installs this process's shared heap and maps the heaps of all other ranks for reading, by rank.
// The same on all ranks: empty if one of them cannot map, for example because a container hides
// processes from each other. Operations are then staged. Every rank calls it.
absl::StatusOr<std::vector<Mapping>> MapPeerMemory(StoreGroup& ranks, double timeout_seconds);

}  // namespace shared

}  // namespace ebb
