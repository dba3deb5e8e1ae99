#include "ebb/offload/transfers.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "ebb/offload/io_error.h"

namespace ebb {

Stripes::Stripes(int files, int64_t bytes, int64_t block_bytes)
    : files_(files),
      bytes_(bytes),
      unit_bytes_(block_bytes * std::max<int64_t>((int64_t{1} << 20) / block_bytes, 1)) {}

Stripes Stripes::Joined(std::span<const int64_t> sizes) {
  Stripes joined(static_cast<int>(sizes.size()), 0, /*block_bytes=*/1);
  for (const int64_t bytes : sizes) joined.ends_.push_back(joined.bytes_ += bytes);
  return joined;
}

Stripes::Place Stripes::PlaceOf(int64_t offset) const {
  if (!ends_.empty()) {
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), offset);
    const int64_t begin = end == ends_.begin() ? 0 : *(end - 1);
    return {static_cast<int>(end - ends_.begin()), offset - begin, *end - offset};
  }
  if (files_ == 1) return {0, offset, bytes_ - offset};
  const int64_t unit = offset / unit_bytes_;
  const int64_t within = offset % unit_bytes_;
  return {static_cast<int>(unit % files_), unit / files_ * unit_bytes_ + within,
          unit_bytes_ - within};
}

int64_t Stripes::FileBytes(int file) const {
  if (!ends_.empty()) {
    const auto index = static_cast<size_t>(file);
    return ends_[index] - (index == 0 ? 0 : ends_[index - 1]);
  }
  const int64_t units = bytes_ / unit_bytes_;
  const int64_t whole = (units / files_ + (file < units % files_ ? 1 : 0)) * unit_bytes_;
  return whole + (file == units % files_ ? bytes_ % unit_bytes_ : 0);
}

namespace {

// A request without progress is repeated at once. After Refusals::kTriesMin times there is a pause
// before each repetition, one pause for all repeated requests.
constexpr std::chrono::milliseconds kPause{1};

bool AsksAgain(int64_t result) {
  return result < 0 && MayBeTakenLater(static_cast<int>(-result));
}

}  // namespace

Transfers::Transfers(const Stripes& stripes, std::vector<std::string> paths, int64_t block_bytes,
                     int depth, bool direct)
    : stripes_(stripes),
      paths_(std::move(paths)),
      block_bytes_(block_bytes),
      granularity_(direct ? ShardFile::kAlignment : 1),
      requests_(static_cast<size_t>(depth)) {
  for (Request& request : requests_) request.next_free = std::exchange(free_, &request);
}

void Transfers::Start(IoTransfer& transfer) {
  transfer.transfers_ = this;
  transfer.cut_ = 0;
  transfer.next_ = nullptr;
  under_way_.fetch_add(1, std::memory_order_relaxed);
  transfer.under_way_.store(true, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    lines_[transfer.write_ ? 1 : 0].Push(transfer);
  }
  Pump();
}

void Transfers::Wait(const IoTransfer& transfer) {
  Await([&] { return transfer.done(); });
}

void Transfers::WaitAll() {
  Await([&] { return under_way_.load(std::memory_order_acquire) == 0; });
}

void Transfers::Await(absl::FunctionRef<bool()> over) {
  while (!over() && queue_->Drive()) continue;
  changed_.Await(over);
}

void Transfers::Pump() {
  Batch batch;
  while (const size_t count = Cut(batch)) queue_->Submit({batch.data(), count});
}

size_t Transfers::Cut(Batch& batch) {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  while (count < kBatchMax && free_ != nullptr) {
    if (lines_[next_line_].first == nullptr) next_line_ = 1 - next_line_;
    Line& line = lines_[next_line_];
    if (line.first == nullptr) break;
    Request& request = *std::exchange(free_, free_->next_free);
    CutBlock(*line.first, request);
    batch[count++] = &request;
    if (line.first->cut_ == line.first->bytes_) Leave(line);
    next_line_ = 1 - next_line_;
  }
  return count;
}

void Transfers::CutBlock(IoTransfer& transfer, Request& request) {
  const Stripes::Place place = stripes_.PlaceOf(transfer.offset_ + transfer.cut_);
  request.write = transfer.write_;
  request.file = place.file;
  request.offset = place.offset;
  request.data = transfer.data_ + transfer.cut_;
  request.bytes = std::min({block_bytes_, place.bytes, transfer.bytes_ - transfer.cut_});
  request.transfer = &transfer;
  request.refusals.Moved();
  transfer.cut_ += request.bytes;
  ++transfer.requests_;
}

void Transfers::Leave(Line& line) {
  line.first = line.first->next_;
}

void Transfers::Completed(std::span<const IoCompletion> completions) {
  IoRequestList again;
  bool pauses = false;
  for (const IoCompletion& completion : completions) {
    auto& request = static_cast<Request&>(*completion.request);
    const Next next = NextOf(request, completion.result);
    if (next == Next::kOver) {
      Finish(request);
      continue;
    }
    again.Push(request);
    pauses |= next == Next::kAgainAfterPause;
  }
  if (pauses) std::this_thread::sleep_for(kPause);
  while (!again.empty()) {
    Batch batch;
    size_t count = 0;
    while (count < kBatchMax && !again.empty()) batch[count++] = &again.Pop();
    queue_->Submit({batch.data(), count});
  }
  Pump();
}

// The next action for this request. The request becomes its own rest.
Transfers::Next Transfers::NextOf(Request& request, int64_t result) {
  const auto fail = [&](absl::Status status) {
    const std::lock_guard lock(mutex_);
    request.transfer->status_.Update(std::move(status));
    return Next::kOver;
  };
  const std::string& path = paths_[request.file];
  if (result < 0 && !AsksAgain(result)) {
    return fail(TransferError(request.write, path, request.offset, request.bytes,
                              static_cast<int>(-result)));
  }
  if (result == 0 && !request.write) {
    return fail(FileEndsEarly(path, request.offset, request.bytes));
  }
  const int64_t moved = std::max<int64_t>(result, 0) / granularity_ * granularity_;
  moved_[request.write ? 1 : 0].fetch_add(moved, std::memory_order_relaxed);
  if (moved == request.bytes) return Next::kOver;
  {
    const std::lock_guard lock(mutex_);
    if (!request.transfer->status_.ok()) return Next::kOver;
  }
  request.offset += moved;
  request.data += moved;
  request.bytes -= moved;
  if (moved > 0) {
    request.refusals.Moved();
    return Next::kAgain;
  }
  const bool given_up = request.refusals.Refused();
  if (request.refusals.count() <= Refusals::kTriesMin) return Next::kAgain;
  if (result < 0 && !given_up) return Next::kAgainAfterPause;
  if (result >= 0 && !request.write) {
    return fail(FileEndsEarly(path, request.offset, request.bytes));
  }
  return fail(TransferError(request.write, path, request.offset, request.bytes,
                            result < 0 ? static_cast<int>(-result) : ENOSPC));
}

void Transfers::Finish(Request& request) {
  IoTransfer& transfer = *request.transfer;
  {
    const std::lock_guard lock(mutex_);
    request.next_free = std::exchange(free_, &request);
    Line& line = lines_[transfer.write_ ? 1 : 0];
    // A failed transfer is not cut any further. Only the first transfer in line can be cut in part.
    if (!transfer.status_.ok() && transfer.cut_ < transfer.bytes_) {
      assert(line.first == &transfer);
      transfer.cut_ = transfer.bytes_;
      Leave(line);
    }
    if (--transfer.requests_ > 0 || transfer.cut_ < transfer.bytes_) return;
    transfer.next_ = nullptr;
    over_.Push(transfer);
  }
}

void Transfers::Announce() {
  Line over;
  {
    const std::lock_guard lock(mutex_);
    over = std::exchange(over_, {});
  }
  if (over.first == nullptr) return;
  for (IoTransfer* transfer = over.first; transfer != nullptr;) {
    IoTransfer* const next = transfer->next_;
    // From here on the owner may reuse or destroy the transfer.
    transfer->under_way_.store(false, std::memory_order_release);
    under_way_.fetch_sub(1, std::memory_order_release);
    transfer = next;
  }
  changed_.Notify();
}

}  // namespace ebb
