// Cuts transfers of any size into requests of one block each, and keeps the queue filled up to its
// depth. If the system moved less than a request, the rest is requested. If the system refuses for
// now, the request is repeated for about a second (io_error.h). Reads and writes take turns, each
// in the order of their start.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/offload/io_error.h"
#include "ebb/offload/io_queue.h"
#include "ebb/offload/shard_file.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

// How a file is striped over several files, unit by unit in turn. Or how several files are joined
// end to end.
//
//   file 0: | 0 | 2 | 4 |     file 1: | 1 | 3 | 5 |      joined: | file 0 | file 1 |
class Stripes {
 public:
  struct Place {
    int file = 0;
    int64_t offset = 0;  // in that file
    int64_t bytes = 0;   // to the end of the unit; one file, or joined: to that of the file
  };

  // The unit is at least 1 MiB, in whole blocks.
  Stripes(int files, int64_t bytes, int64_t block_bytes);
  // Joins files of these sizes, each in whole blocks.
  static Stripes Joined(std::span<const int64_t> sizes);

  Place PlaceOf(int64_t offset) const;
  int64_t FileBytes(int file) const;
  int64_t bytes() const { return bytes_; }

 private:
  int64_t files_;
  int64_t bytes_;
  int64_t unit_bytes_;
  std::vector<int64_t> ends_;  // of joined files
};

class Transfers final : public IoListener {
 public:
  // `direct`: the system moves only whole multiples of ShardFile::kAlignment.
  Transfers(const Stripes& stripes, std::vector<std::string> paths, int64_t block_bytes, int depth,
            bool direct);
  // Call it before the first Start. The queue is destroyed before this object.
  void Use(IoQueue* queue) { queue_ = queue; }

  void Start(IoTransfer& transfer);
  void Wait(const IoTransfer& transfer);
  void WaitAll();

  void Completed(std::span<const IoCompletion> completions) override;
  void Announce() override;

  int64_t bytes_read() const { return moved_[0].load(std::memory_order_relaxed); }
  int64_t bytes_written() const { return moved_[1].load(std::memory_order_relaxed); }

 private:
  struct Request : IoRequest {
    IoTransfer* transfer = nullptr;
    Refusals refusals;
    Request* next_free = nullptr;
  };
  struct Line {
    IoTransfer* first = nullptr;
    IoTransfer* last = nullptr;
    void Push(IoTransfer& transfer) {
      (first == nullptr ? first : last->next_) = &transfer;
      last = &transfer;
    }
  };
  static constexpr size_t kBatchMax = 64;
  using Batch = std::array<IoRequest*, kBatchMax>;

  void Await(absl::FunctionRef<bool()> over);
  size_t Cut(Batch& batch);
  void CutBlock(IoTransfer& transfer, Request& request);
  void Pump();
  enum class Next : uint8_t { kOver, kAgain, kAgainAfterPause };
  Next NextOf(Request& request, int64_t result);
  void Finish(Request& request);
  void Leave(Line& line);

  const Stripes stripes_;
  const std::vector<std::string> paths_;
  const int64_t block_bytes_;
  const int64_t granularity_;
  IoQueue* queue_ = nullptr;
  std::vector<Request> requests_;
  WaitPoint changed_;
  std::array<std::atomic<int64_t>, 2> moved_ = {};  // read, written
  std::atomic<int64_t> under_way_{0};

  std::mutex mutex_;  // guards the members below and the transfers under way
  Request* free_ = nullptr;
  std::array<Line, 2> lines_ = {};  // started, not wholly cut into requests
  size_t next_line_ = 0;
  Line over_;  // over, but not announced yet
};

}  // namespace ebb
