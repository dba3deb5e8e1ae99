#include "ebb/runtime/checkpoint/streamed_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/file_transfers.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/device/cpu/copy.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {
namespace {

constexpr int64_t kWriteSlotBytes = 4 << 20;
constexpr int64_t kWriteSlots = StreamedFile::kMemoryBytes / kWriteSlotBytes;

}  // namespace

struct StreamedFile::State {
  struct Slot {
    std::byte* data = nullptr;  // null: not used yet
    PinnedMemory own;
    IoTransfer transfer;
  };

  State(FileHandle handle, std::string name, IoBackend with, std::span<std::byte> memory)
      : file(std::move(handle)), path(std::move(name)), backend(with) {
    assert(memory.empty() || std::ssize(memory) >= kMemoryBytes);
    for (size_t i = 0; !memory.empty() && i < slots.size(); ++i)
      slots[i].data = memory.data() + static_cast<int64_t>(i) * kWriteSlotBytes;
  }

  // The slot that is being filled. The disk has the bytes of earlier slots.
  absl::StatusOr<std::byte*> Filling();
  absl::Status Reserve();
  absl::Status FinishSlot();
  void StartFull();
  absl::Status StartTransfers(std::byte* block);
  // Waits until the disk has all full slots. Later writes go through the page cache.
  absl::Status Flush();

  FileHandle file;
  const std::string path;
  const IoBackend backend;
  int64_t end = 0;            // of the appended bytes
  int64_t filled = 0;         // bytes of the slot that is being filled
  int64_t bytes = INT64_MAX;  // of the file, where that is known
  size_t slot = 0;            // the index of that slot
  bool full = false;          // the slot before is full, but its write has not started
  bool reserved = false;
  ThreadTeam caller_only{1};
  std::array<Slot, kWriteSlots> slots;
  std::unique_ptr<FileTransfers> transfers;  // goes before the slots; null: no slot was full yet
};

StreamedFile::StreamedFile(std::unique_ptr<State> state) : state_(std::move(state)) {}
StreamedFile::StreamedFile(StreamedFile&&) noexcept = default;
StreamedFile::~StreamedFile() = default;

absl::StatusOr<StreamedFile> StreamedFile::Create(std::string path, IoBackend backend,
                                                  std::span<std::byte> memory) {
  EBB_ASSIGN_OR_RETURN(FileHandle file, CreateFile(path));
  return StreamedFile(std::make_unique<State>(std::move(file), std::move(path), backend, memory));
}

const std::string& StreamedFile::path() const {
  return state_->path;
}

void StreamedFile::Expect(int64_t begin, int64_t end) {
  assert(begin % kDiskAlignment == 0 && state_->end == 0);
  state_->end = begin;
  state_->bytes = end;
}

absl::Status StreamedFile::State::Reserve() {
  if (std::exchange(reserved, true) || bytes == INT64_MAX) return absl::OkStatus();
  int result = 0;
  do {
    result = fallocate(file.get(), 0, 0, bytes);
  } while (result != 0 && errno == EINTR);
  // If the file system cannot reserve space, each write takes its own.
  if (result == 0 || errno == EOPNOTSUPP || errno == ENOSYS) return absl::OkStatus();
  return FileError(absl::StrCat("reserving ", bytes, " bytes for"), path, errno);
}

absl::StatusOr<std::byte*> StreamedFile::State::Filling() {
  Slot& filling = slots[slot];
  if (filling.data == nullptr) {
    EBB_ASSIGN_OR_RETURN(filling.own, AllocatePinned(kWriteSlotBytes, /*pin=*/false, path));
    filling.data = filling.own.buffer.data();
  }
  if (transfers != nullptr && filled == 0) {
    EBB_RETURN_IF_ERROR(transfers->Wait(filling.transfer));
    StartFull();
  }
  return filling.data;
}

absl::Status StreamedFile::Append(std::span<const std::byte> bytes) {
  if (!bytes.empty()) EBB_RETURN_IF_ERROR(state_->Reserve());
  while (!bytes.empty()) {
    EBB_ASSIGN_OR_RETURN(std::byte* const slot, state_->Filling());
    const size_t taken =
        std::min(bytes.size(), static_cast<size_t>(kWriteSlotBytes - state_->filled));
    CopyBytes(state_->caller_only, slot + state_->filled, bytes.data(), static_cast<int64_t>(taken),
              /*together_bytes=*/kMemoryBytes);
    bytes = bytes.subspan(taken);
    state_->filled += static_cast<int64_t>(taken);
    state_->end += static_cast<int64_t>(taken);
    if (state_->filled == kWriteSlotBytes) EBB_RETURN_IF_ERROR(state_->FinishSlot());
  }
  return absl::OkStatus();
}

absl::Status StreamedFile::State::FinishSlot() {
  if (transfers == nullptr) EBB_RETURN_IF_ERROR(StartTransfers(slots[slot].data));
  slot = (slot + 1) % slots.size();
  filled = 0;
  full = true;
  return absl::OkStatus();
}

// Called after the wait for the next slot's memory. So a disk that completes all requests at once
// has a request while the next slot is filled.
void StreamedFile::State::StartFull() {
  if (!std::exchange(full, false)) return;
  Slot& last = slots[(slot + slots.size() - 1) % slots.size()];
  transfers->Start(last.transfer, /*write=*/true, end - kWriteSlotBytes, last.data,
                   kWriteSlotBytes);
}

// Writes `block`, the first one, to find out whether the file system can bypass the page cache.
absl::Status StreamedFile::State::StartTransfers(std::byte* block) {
  bool direct = fcntl(file.get(), F_SETFL, O_DIRECT) == 0;
  if (direct && pwrite(file.get(), block, kDiskAlignment, end - kWriteSlotBytes) < 0) {
    if (errno != EINVAL && errno != EOPNOTSUPP) return FileError("writing", path, errno);
    direct = false;
    fcntl(file.get(), F_SETFL, 0);
  }
  const int64_t whole = (std::max(bytes, end) / kDiskAlignment) * kDiskAlignment;
  EBB_ASSIGN_OR_RETURN(transfers,
                       FileTransfers::Create(Stripes(/*files=*/1, whole, AioOptions().block_bytes),
                                             {.files = {file.get()},
                                              .paths = {path},
                                              .direct = direct,
                                              .backend = backend,
                                              .own_thread = false}));
  return absl::OkStatus();
}

absl::Status StreamedFile::State::Flush() {
  if (transfers != nullptr) {
    StartFull();
    const int64_t whole = filled / kDiskAlignment * kDiskAlignment;
    std::byte* const data = slots[slot].data;
    if (whole > 0)
      transfers->Start(slots[slot].transfer, /*write=*/true, end - filled, data, whole);
    absl::Status first;
    for (Slot& other : slots) first.Update(transfers->Wait(other.transfer));
    transfers.reset();
    EBB_RETURN_IF_ERROR(first);
    fcntl(file.get(), F_SETFL, 0);
    if (whole > 0) std::memmove(data, data + whole, static_cast<size_t>(filled - whole));
    filled -= whole;
  }
  if (filled == 0) return absl::OkStatus();
  const std::span<const std::byte> rest(slots[slot].data, static_cast<size_t>(filled));
  return ebb::WriteAt(file.get(), path, end - std::exchange(filled, 0), rest);
}

absl::Status StreamedFile::WriteAt(int64_t byte, std::span<const std::byte> bytes) {
  EBB_RETURN_IF_ERROR(state_->Flush());
  return ebb::WriteAt(state_->file.get(), state_->path, byte, bytes);
}

absl::Status StreamedFile::Sync() {
  EBB_RETURN_IF_ERROR(state_->Flush());
  return SyncFile(state_->file.get(), state_->path);
}

}  // namespace ebb
