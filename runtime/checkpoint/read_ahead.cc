#include "ebb/runtime/checkpoint/read_ahead.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/file_transfers.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"

namespace ebb {
namespace {

// Room for the whole blocks of the disk around a range.
constexpr int64_t kSlotBytes = ReadAhead::kRangeMax + 2 * kDiskAlignment;
constexpr int64_t kSlots = ReadAhead::kMemoryBytes / kSlotBytes;

constexpr int64_t Down(int64_t bytes) {
  return bytes / kDiskAlignment * kDiskAlignment;
}

struct OpenFile {
  FileHandle handle;
  std::string path;
  int64_t whole = 0;  // bytes of its whole blocks
  int64_t start = 0;  // their begin among the bytes of all files
};

}  // namespace

struct ReadAhead::State {
  absl::StatusOr<bool> SetDirect();
  void Start(size_t range);
  absl::StatusOr<std::span<const std::byte>> Show(size_t range);
  std::byte* SlotOf(size_t range) const {
    return memory + static_cast<int64_t>(range % kSlots) * kSlotBytes;
  }

  std::vector<Range> ranges;
  std::vector<OpenFile> files;
  size_t next = 0;
  PinnedMemory own;
  std::byte* memory = nullptr;
  std::array<IoTransfer, kSlots> slots;
  std::unique_ptr<FileTransfers> transfers;  // goes before the slots
};

ReadAhead::ReadAhead(std::unique_ptr<State> state) : state_(std::move(state)) {}
ReadAhead::~ReadAhead() = default;

absl::StatusOr<std::unique_ptr<ReadAhead>> ReadAhead::Open(const std::vector<std::string>& paths,
                                                           std::vector<Range> ranges,
                                                           IoBackend backend,
                                                           std::span<std::byte> memory) {
  if (paths.empty()) return absl::InvalidArgumentError("there is no file to read ahead");
  auto state = std::make_unique<State>();
  state->ranges = std::move(ranges);
  constexpr int kDepth = 32;  // blocks of 1 MiB: as many as half the slots hold
  FileTransfers::Options options{.backend = backend, .own_thread = false};
  options.aio.queue_depth = std::max(kDepth / static_cast<int>(paths.size()), 1);
  std::vector<int64_t> sizes;
  int64_t start = 0;
  for (const std::string& path : paths) {
    EBB_ASSIGN_OR_RETURN(FileHandle handle, OpenToRead(path));
    EBB_ASSIGN_OR_RETURN(const int64_t bytes, BytesOfRegularFile(handle.get(), path));
    options.files.push_back(handle.get());
    options.paths.push_back(path);
    sizes.push_back(Down(bytes));
    state->files.push_back(
        {.handle = std::move(handle), .path = path, .whole = Down(bytes), .start = start});
    start += Down(bytes);
  }
  assert(memory.empty() || std::ssize(memory) >= kMemoryBytes);
  if (memory.empty()) {
    EBB_ASSIGN_OR_RETURN(
        state->own, AllocatePinned(kSlots * kSlotBytes, /*pin=*/false, "a checkpoint's blocks"));
    memory = state->own.buffer.span();
  }
  state->memory = memory.data();
  // Registered, so that the kernel does not look up the pages for each request.
  options.memory = {memory};
  EBB_ASSIGN_OR_RETURN(options.direct, state->SetDirect());
  EBB_ASSIGN_OR_RETURN(state->transfers, FileTransfers::Create(Stripes::Joined(sizes), options));
  for (size_t range = 0; range < std::min<size_t>(kSlots, state->ranges.size()); ++range)
    state->Start(range);
  return std::unique_ptr<ReadAhead>(new ReadAhead(std::move(state)));
}

// Sets O_DIRECT for all files or for none. Some file systems refuse only the first transfer.
absl::StatusOr<bool> ReadAhead::State::SetDirect() {
  for (const OpenFile& file : files) {
    const int descriptor = file.handle.get();
    bool direct = fcntl(descriptor, F_SETFL, O_DIRECT) == 0;
    if (direct && pread(descriptor, memory, kDiskAlignment, 0) < 0) {
      if (errno != EINVAL && errno != EOPNOTSUPP) return FileError("reading", file.path, errno);
      direct = false;
    }
    if (direct) continue;
    for (const OpenFile& other : files) fcntl(other.handle.get(), F_SETFL, 0);
    return false;
  }
  return true;
}

void ReadAhead::State::Start(size_t range) {
  const Range& of = ranges[range];
  assert(of.bytes <= kRangeMax);
  const OpenFile& file = files[of.file];
  const int64_t begin = Down(of.at);
  const int64_t end = std::min(file.whole, Down(of.at + of.bytes + kDiskAlignment - 1));
  transfers->Start(slots[range % kSlots], /*write=*/false, file.start + begin, SlotOf(range),
                   std::max<int64_t>(end - begin, 0));
}

// Bytes behind the file's last whole block come through the page cache.
absl::StatusOr<std::span<const std::byte>> ReadAhead::State::Show(size_t range) {
  const Range& of = ranges[range];
  EBB_RETURN_IF_ERROR(transfers->Wait(slots[range % kSlots]));
  std::byte* const data = SlotOf(range) + of.at % kDiskAlignment;
  const OpenFile& file = files[of.file];
  const int64_t rest = of.at + of.bytes - std::max(file.whole, of.at);
  if (rest > 0) {
    EBB_ASSIGN_OR_RETURN(const FileHandle handle, OpenToRead(file.path));
    EBB_RETURN_IF_ERROR(ReadAt(handle.get(), file.path, of.at + of.bytes - rest,
                               {data + (of.bytes - rest), static_cast<size_t>(rest)}));
  }
  return std::span<const std::byte>(data, static_cast<size_t>(of.bytes));
}

absl::StatusOr<std::span<const std::byte>> ReadAhead::Next() {
  State& state = *state_;
  assert(state.next < state.ranges.size());
  const size_t range = state.next++;
  const absl::StatusOr<std::span<const std::byte>> shown = state.Show(range);
  // The slot of the range before is free now. Its next read starts after the wait, so that a disk
  // that completes all requests at once has a request again while the caller uses this range.
  if (range > 0 && range - 1 + kSlots < state.ranges.size()) state.Start(range - 1 + kSlots);
  return shown;
}

}  // namespace ebb
