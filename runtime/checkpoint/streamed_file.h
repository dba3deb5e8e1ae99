// A new file that is written from its beginning to its end. Bypasses the page cache if the file
// system allows that:
//
//   Append --copy--> | slot | slot | slot | ... |  each 4 MiB
//
// A full slot is written while the next one is filled.
//
// The first and the last bytes of the file, and all of a small one, go through the page cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/io_backend.h"

namespace ebb {

class StreamedFile {
 public:
  // The most host memory of one file, from the first Append on.
  static constexpr int64_t kMemoryBytes = int64_t{32} << 20;

  // `memory`: pages of that size, borrowed; empty: its own.
  static absl::StatusOr<StreamedFile> Create(std::string path, IoBackend backend = IoBackend::kAuto,
                                             std::span<std::byte> memory = {});
  StreamedFile(StreamedFile&&) noexcept;
  ~StreamedFile();

  const std::string& path() const;
  // Before the first Append: it writes from byte `begin` on, a multiple of kDiskAlignment, and the
  // file ends at `end`.
  void Expect(int64_t begin, int64_t end);
  // The first call reserves the space on the disk, if the file system can.
  absl::Status Append(std::span<const std::byte> bytes);
  // Writes bytes before the first appended byte. Call it after the last Append.
  absl::Status WriteAt(int64_t byte, std::span<const std::byte> bytes);
  // Returns when the whole file is on the disk. The last call.
  absl::Status Sync();

 private:
  struct State;
  explicit StreamedFile(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace ebb
