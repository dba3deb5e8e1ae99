// Transfers between memory and open files: through io_uring, or through a few threads if io_uring
// is denied or not wanted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/shard_file.h"
#include "ebb/offload/transfers.h"

namespace ebb {

class FileTransfers {
 public:
  struct Options {
    std::vector<int> files = {};  // open descriptors, borrowed; one for each file of the stripes
    std::vector<std::string> paths = {};
    bool direct = false;  // all of them were opened with O_DIRECT
    AioOptions aio = {};
    IoBackend backend = IoBackend::kAuto;
    // False: one thread at a time starts transfers and waits for them, and drives the ring while it
    // waits.
    bool own_thread = true;
    std::vector<std::span<std::byte>> memory = {};  // both as in ShardFile::Options
    std::function<absl::StatusOr<std::unique_ptr<IoQueue>>(IoListener&,
                                                           const ShardFile::Options::MakeQueue&)>
        wrap_queue = {};
  };

  // kFailedPrecondition: IoBackend::kUring without io_uring.
  static absl::StatusOr<std::unique_ptr<FileTransfers>> Create(const Stripes& stripes,
                                                               const Options& options);
  // An object of which all transfers fail with `error`.
  static std::unique_ptr<FileTransfers> Failed(const Stripes& stripes, const Options& options,
                                               absl::Status error);
  // Waits for transfers under way.
  ~FileTransfers();

  // ShardFile's StartRead, StartWrite and Wait. Offsets count in the striped file.
  void Start(IoTransfer& transfer, bool write, int64_t offset, std::byte* data, int64_t bytes);
  absl::Status Wait(IoTransfer& transfer);

  int64_t bytes_read() const;
  int64_t bytes_written() const;
  IoBackend backend() const { return backend_; }
  std::string description() const;
  const absl::Status& error() const { return error_; }  // of Failed

 private:
  explicit FileTransfers(const Stripes& stripes, const Options& options);
  absl::Status MakeQueue(const Options& options);

  const Stripes stripes_;
  const std::string first_path_;
  const bool direct_;
  absl::Status error_;
  // In the order in which they outlive each other.
  std::unique_ptr<Transfers> transfers_;
  IoBackend backend_ = IoBackend::kThreads;
  std::unique_ptr<IoQueue> queue_;
};

}  // namespace ebb
