// A file of shards on the disk, and transfers between it and memory. It uses io_uring and bypasses
// the page cache. If the machine does not allow one of these, it uses a few threads, or the cache,
// with the same calls, and one line of the log says so.
//
//   IoTransfer transfer;                        // once
//   file->StartRead(transfer, offset, data, bytes);
//   ...                                         // the transfer runs
//   status = file->Wait(transfer);              // data is there
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/io_backend.h"

namespace ebb {

class IoListener;
class IoQueue;
class Transfers;

struct AioOptions {
  int64_t block_bytes = int64_t{1} << 20;  // of a request
  int queue_depth = 32;                    // requests in flight, for each directory
  // If threads move the data: their minimum for all directories, each with one request in flight.
  int threads = 1;
  bool single_submit = false;  // a system call for each request
};

// One transfer between memory and a shard file. The caller owns and reuses it: starting one
// allocates nothing. The destructor waits until the transfer is over.
class IoTransfer {
 public:
  IoTransfer() = default;
  IoTransfer(const IoTransfer&) = delete;
  IoTransfer& operator=(const IoTransfer&) = delete;
  ~IoTransfer();

  // True if it is over or was never started.
  bool done() const { return !under_way_.load(std::memory_order_acquire); }

 private:
  friend class FileTransfers;
  friend class Transfers;

  Transfers* transfers_ = nullptr;
  bool write_ = false;
  int64_t offset_ = 0;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  int64_t cut_ = 0;   // bytes that have become requests
  int requests_ = 0;  // in flight
  IoTransfer* next_ = nullptr;
  absl::Status status_;
  std::atomic<bool> under_way_{false};
};

class ShardFile {
 public:
  // Offsets, lengths and addresses of transfers are multiples of this.
  static constexpr int64_t kAlignment = kDiskAlignment;

  struct Options {
    // The file is striped over them, one unnamed file in each (unnamed_file.h). They are made if
    // they do not exist.
    std::vector<std::string> directories;
    std::string name, owner = {};  // for messages: "states", "engine-rank0"
    int64_t bytes = 0;
    // For the error of a full disk: the other files that will be made there.
    std::string whole_need = {};
    AioOptions aio;
    IoBackend backend = IoBackend::kAuto;
    // Registered with the ring if allowed; outlives the file.
    std::vector<std::span<std::byte>> memory;
    bool own_thread = true;  // as IoQueueOptions
    // For tests: makes the usual queue and wraps it.
    using MakeQueue = std::function<absl::StatusOr<std::unique_ptr<IoQueue>>(IoListener&)>;
    std::function<absl::StatusOr<std::unique_ptr<IoQueue>>(IoListener&, const MakeQueue&)>
        wrap_queue;
  };

  // Reserves the space. kResourceExhausted names the path, the needed and the free bytes.
  // kFailedPrecondition: IoBackend::kUring without io_uring.
  static absl::StatusOr<std::unique_ptr<ShardFile>> Create(const Options& options);
  // Waits for transfers under way, and frees the space of the file.
  ~ShardFile();

  // Call it between transfers. The file is then `bytes` long (nothing: its old length), keeps its
  // contents up to there, and has other memory registered. After an error each transfer fails with
  // it, until a later call succeeds.
  absl::Status Reopen(std::optional<int64_t> bytes, std::vector<std::span<std::byte>> memory);

  // Start a transfer and return, from any thread. The requests in flight are bounded; started
  // transfers wait in line. Start a transfer again only when it is over. Wait returns its error.
  // Transfers that share bytes have no order: the caller waits between them.
  void StartRead(IoTransfer& transfer, int64_t offset, std::byte* data, int64_t bytes);
  void StartWrite(IoTransfer& transfer, int64_t offset, const std::byte* data, int64_t bytes);
  // Blocks until the transfer is over. Errors name the file, the offset and a remedy: kDataLoss (a
  // failing disk, a truncated file), kResourceExhausted (a full disk).
  absl::Status Wait(IoTransfer& transfer);

  // Moved bytes, from any thread.
  int64_t bytes_read() const;
  int64_t bytes_written() const;

  IoBackend backend() const;
  // For messages: "io_uring, registered buffers, O_DIRECT" or "4 threads, page cache".
  std::string description() const;
  // For messages: "'/a (states of engine-rank0)'", and all paths of a striped file.
  std::string paths() const;

 private:
  struct State;
  explicit ShardFile(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace ebb
