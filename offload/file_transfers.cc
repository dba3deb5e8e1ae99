#include "ebb/offload/file_transfers.h"

#include <cassert>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/offload/io_queue.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

bool Aligned(int64_t bytes) {
  return bytes % kDiskAlignment == 0;
}

void SayThreads(const absl::Status& why) {
  static std::once_flag said;
  std::call_once(said, [&] {
    LogWarning(absl::StrCat(why.message(), ". Going on with threads that read and write"));
  });
}

}  // namespace

FileTransfers::FileTransfers(const Stripes& stripes, const Options& options)
    : stripes_(stripes),
      first_path_(options.paths.front()),
      direct_(options.direct),
      transfers_(std::make_unique<Transfers>(
          stripes, options.paths, options.aio.block_bytes,
          options.aio.queue_depth * static_cast<int>(options.files.size()), options.direct)) {}

absl::StatusOr<std::unique_ptr<FileTransfers>> FileTransfers::Create(const Stripes& stripes,
                                                                     const Options& options) {
  std::unique_ptr<FileTransfers> made(new FileTransfers(stripes, options));
  EBB_RETURN_IF_ERROR(made->MakeQueue(options));
  return made;
}

std::unique_ptr<FileTransfers> FileTransfers::Failed(const Stripes& stripes, const Options& options,
                                                     absl::Status error) {
  std::unique_ptr<FileTransfers> failed(new FileTransfers(stripes, options));
  failed->error_ = std::move(error);
  return failed;
}

absl::Status FileTransfers::MakeQueue(const Options& options) {
  const IoQueueOptions queue_options = {
      .files = options.files,
      .memory = options.memory,
      .depth = options.aio.queue_depth * static_cast<int>(options.files.size()),
      .threads = options.aio.threads,
      .single_submit = options.aio.single_submit,
      .own_thread = options.own_thread};
  const auto make = [&](IoListener& listener) -> absl::StatusOr<std::unique_ptr<IoQueue>> {
    backend_ = IoBackend::kThreads;
    if (options.backend == IoBackend::kThreads) return MakeThreadQueue(queue_options, listener);
    auto uring = MakeUringQueue(queue_options, listener);
    if (absl::IsUnavailable(uring.status()) && options.backend == IoBackend::kAuto) {
      SayThreads(uring.status());
      return MakeThreadQueue(queue_options, listener);
    }
    if (absl::IsUnavailable(uring.status())) {
      return absl::FailedPreconditionError(
          absl::StrCat(uring.status().message(), "; ebb.io_backend \"auto\" uses threads instead"));
    }
    backend_ = IoBackend::kUring;
    return uring;
  };
  EBB_ASSIGN_OR_RETURN(
      queue_, options.wrap_queue ? options.wrap_queue(*transfers_, make) : make(*transfers_));
  transfers_->Use(queue_.get());
  return absl::OkStatus();
}

FileTransfers::~FileTransfers() {
  transfers_->WaitAll();
}

void FileTransfers::Start(IoTransfer& transfer, bool write, int64_t offset, std::byte* data,
                          int64_t bytes) {
  assert(transfer.done());
  transfer.write_ = write;
  transfer.offset_ = offset;
  transfer.data_ = data;
  transfer.bytes_ = bytes;
  transfer.status_ = error_;
  if (!error_.ok()) return;
  if (offset < 0 || bytes < 0 || offset > stripes_.bytes() - bytes) {
    transfer.status_ =
        absl::OutOfRangeError(absl::StrCat(bytes, " bytes at offset ", offset, " of '", first_path_,
                                           "', but it has only ", stripes_.bytes()));
  } else if (!Aligned(offset) || !Aligned(bytes) ||
             reinterpret_cast<uintptr_t>(data) % kDiskAlignment != 0) {
    transfer.status_ = absl::InvalidArgumentError(
        absl::StrCat(bytes, " bytes at offset ", offset, " of '", first_path_,
                     "': offset, length and address have to be multiples of ", kDiskAlignment));
  } else if (bytes > 0) {
    transfers_->Start(transfer);
  }
}

absl::Status FileTransfers::Wait(IoTransfer& transfer) {
  if (!transfer.done()) transfer.transfers_->Wait(transfer);
  return transfer.status_;
}

int64_t FileTransfers::bytes_read() const {
  return transfers_->bytes_read();
}
int64_t FileTransfers::bytes_written() const {
  return transfers_->bytes_written();
}
std::string FileTransfers::description() const {
  if (!error_.ok()) return std::string(error_.message());
  return absl::StrCat(queue_->description(), direct_ ? ", O_DIRECT" : ", page cache");
}

IoTransfer::~IoTransfer() {
  if (!done()) transfers_->Wait(*this);
}

}  // namespace ebb
