// A file of shards on the disk, and transfers between it and memory. Through io_uring past the page
// cache where the machine allows that, else through a few threads or the cache: the same calls, and
// one line of the log says so.
//
//   IoTransfer transfer;                        // once
//   file->StartRead(transfer, offset, data, bytes);
//   ...                                         // it goes on by itself
//   status = file->Wait(transfer);              // data is there
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/io_backend.h"

namespace ebb {

class IoListener;
class IoQueue;
class Transfers;

struct AioOptions {
  int64_t block_bytes = int64_t{1} << 20;  // of a request
  int queue_depth = 32;                    // requests in flight, for each directory
  // Where threads move the data: for all directories, at least, each with one request in flight.
  int threads = 1;
  bool single_submit = false;  // a system call for each request
};

// One transfer between memory and a shard file. Owned and reused by the caller: starting one
// allocates nothing. The destructor waits until it is over.
class IoTransfer {
 public:
  IoTransfer() = default;
  IoTransfer(const IoTransfer&) = delete;
  IoTransfer& operator=(const IoTransfer&) = delete;
  ~IoTransfer();

  // Not under way: over, or never started.
  bool done() const { return !under_way_.load(std::memory_order_acquire); }

 private:
  friend class FileTransfers;
  friend class Transfers;

  Transfers* transfers_ = nullptr;
  bool write_ = false;
  int64_t offset_ = 0;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  int64_t cut_ = 0;   // bytes that requests were made for
  int requests_ = 0;  // in flight
  IoTransfer* next_ = nullptr;
  absl::Status status_;
  std::atomic<bool> under_way_{false};
};

class ShardFile {
 public:
  // Offsets, lengths and addresses of transfers are multiples of it.
  static constexpr int64_t kAlignment = kDiskAlignment;

  struct Options {
    // Existing and private (SwapDirectory), one for each nvme_path: the file is striped over them.
    std::vector<std::string> directories;
    std::string name;
    int64_t bytes = 0;
    // For people, where a disk is full: what will be put there beside this file.
    std::string whole_need = {};
    AioOptions aio;
    IoBackend backend = IoBackend::kAuto;
    // Registered with the ring where that is allowed; outlives the file.
    std::vector<std::span<std::byte>> memory;
    // For tests: makes the queue, of the one that would be used, and puts something between.
    using MakeQueue = std::function<absl::StatusOr<std::unique_ptr<IoQueue>>(IoListener&)>;
    std::function<absl::StatusOr<std::unique_ptr<IoQueue>>(IoListener&, const MakeQueue&)>
        wrap_queue;
  };

  // Reserves the space. kResourceExhausted names the path, what is wanted and what is free;
  // kFailedPrecondition: IoBackend::kUring where there is none.
  static absl::StatusOr<std::unique_ptr<ShardFile>> Create(const Options& options);
  // Waits for what is under way, and removes the file.
  ~ShardFile();

  // Between transfers: at least `bytes` long from now on, with what is in it, and with other memory registered. An
  // error: there are no transfers any more, but for those of a call that succeeds later.
  absl::Status Reopen(int64_t bytes, std::vector<std::span<std::byte>> memory);

  // Start and return, from any thread: what is in flight is bounded, what has been started waits in
  // line. A transfer is started again only when it is over. What is wrong with one, Wait returns.
  // Those that share bytes have no order: the caller waits between them.
  void StartRead(IoTransfer& transfer, int64_t offset, std::byte* data, int64_t bytes);
  void StartWrite(IoTransfer& transfer, int64_t offset, const std::byte* data, int64_t bytes);
  // Blocks until the transfer is over. Errors name the file, the place and what to do: kDataLoss (a
  // failing disk, a truncated file), kResourceExhausted (a full one).
  absl::Status Wait(IoTransfer& transfer);

  // Really moved; from any thread.
  int64_t bytes_read() const;
  int64_t bytes_written() const;

  IoBackend backend() const;
  // For people: "io_uring, registered buffers, O_DIRECT" or "4 threads, page cache".
  std::string description() const;
  // For people: "'/a/states'", all of them where it is striped.
  std::string paths() const;

  // Size, inode, links, mode and the stamp behind the data are what they were at Create, else
  // kDataLoss says which is not. Reads a block of each file, and waits for that.
  absl::Status CheckUnchanged() const;

 private:
  struct State;
  explicit ShardFile(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace ebb
