// Shard files on every backend.
#include "ebb/offload/shard_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <thread>

#include "../device/allocation_counter.h"
#include "absl/strings/match.h"
#include "backends.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/io_queue.h"
#include "limited.h"
#include "made_files.h"
#include "tests/status.h"

namespace ebb::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

bool Same(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

// The open files, by descriptor.
std::map<int, std::string> OpenFiles() {
  std::map<int, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;  // the listing's own descriptor is closed
    const std::string path = std::filesystem::read_symlink(entry.path(), closed);
    if (!closed) files[std::stoi(entry.path().filename())] = path;
  }
  return files;
}

using ShardFileTest = OnEveryBackend;
INSTANTIATE_TEST_SUITE_P(Backends, ShardFileTest, ::testing::ValuesIn(Backends()), NameOf);

TEST_P(ShardFileTest, ReadsBackWrittenData) {
  for (const int64_t bytes : {4096L, 3 * 4096L, 64L << 10, kMiB + 4096, 5 * kMiB, 40 * kMiB}) {
    SCOPED_TRACE(bytes);
    ASSERT_MADE(file, Make(Options(bytes)));
    const PinnedMemory written = Memory(bytes), read = Memory(bytes);
    FillRandomly(written.buffer.span(), static_cast<uint64_t>(bytes));
    ASSERT_EQ(Write(*file, 0, written.buffer.span()), absl::OkStatus());
    ASSERT_EQ(Read(*file, 0, read.buffer.span()), absl::OkStatus());
    EXPECT_TRUE(Same(written.buffer.span(), read.buffer.span()));
    EXPECT_EQ(file->bytes_written(), bytes);
    EXPECT_EQ(file->bytes_read(), bytes);
  }
}

TEST_P(ShardFileTest, ReopenedItHasItsDataAndAnotherLength) {
  constexpr int64_t kBefore = 3 * kMiB + 8192, kAfter = 9 * kMiB + 4096;
  MadeFiles::Watch();
  ASSERT_MADE(file, Make(Options(kBefore)));
  const PinnedMemory written = Memory(kAfter), read = Memory(kAfter);
  FillRandomly(written.buffer.span(), 7);
  ASSERT_EQ(Write(*file, 0, written.buffer.span().first(kBefore)), absl::OkStatus());
  const auto size = [&] {
    int64_t bytes = 0;
    for (const std::string& path : Options(kBefore).directories)
      bytes += MadeFiles::OfProcess().StatOf(path + " (shards)").st_size;
    return bytes;
  };
  const int64_t made = size();
  for (const std::optional<int64_t> bytes : {std::optional<int64_t>(), std::optional(kAfter),
                                             std::optional(kBefore), std::optional(kAfter)}) {
    SCOPED_TRACE(bytes.value_or(-1));
    const absl::Status reopened = file->Reopen(bytes, {read.buffer.span()});
    if (IsForLackOfMemlock(Options(kBefore), reopened)) GTEST_SKIP() << reopened;
    ASSERT_EQ(reopened, absl::OkStatus());
    ASSERT_EQ(Read(*file, 0, read.buffer.span().first(kBefore)), absl::OkStatus());
    EXPECT_TRUE(Same(written.buffer.span().first(kBefore), read.buffer.span().first(kBefore)));
    EXPECT_EQ(size(), made + bytes.value_or(kBefore) - kBefore);
  }
  ASSERT_EQ(Write(*file, 0, written.buffer.span()), absl::OkStatus());
  ASSERT_EQ(Read(*file, 0, read.buffer.span()), absl::OkStatus());
  EXPECT_TRUE(Same(written.buffer.span(), read.buffer.span()));
}

TEST_P(ShardFileTest, AfterAFailedReopenTransfersFailUntilOneSucceeds) {
  bool refuses = false;
  ShardFile::Options options = Options(kMiB);
  options.wrap_queue =
      [&](IoListener& listener,
          const ShardFile::Options::MakeQueue& make) -> absl::StatusOr<std::unique_ptr<IoQueue>> {
    if (refuses) return absl::ResourceExhaustedError("no queue");
    return make(listener);
  };
  ASSERT_MADE(file, Make(options));
  const PinnedMemory memory = Memory(kMiB);
  refuses = true;
  const absl::Status failed = file->Reopen(2 * kMiB, {});
  EXPECT_EQ(failed, absl::ResourceExhaustedError("no queue"));
  EXPECT_EQ(Write(*file, 0, memory.buffer.span()), failed);
  EXPECT_EQ(Read(*file, 0, memory.buffer.span()), failed);
  EXPECT_EQ(file->bytes_read() + file->bytes_written(), 0);
  EXPECT_EQ(file->description(), "no queue");
  EXPECT_EQ(file->backend(), IoBackend::kThreads);
  EXPECT_EQ(file->Reopen({}, {}), failed);
  refuses = false;
  ASSERT_EQ(file->Reopen(2 * kMiB, {}), absl::OkStatus());
  EXPECT_EQ(Write(*file, kMiB, memory.buffer.span()), absl::OkStatus());
}

TEST_P(ShardFileTest, BlocksOfAnySizeMoveTheSame) {
  constexpr int64_t kBytes = 5 * kMiB + 8192;
  const PinnedMemory written = Memory(kBytes), read = Memory(kBytes);
  FillRandomly(written.buffer.span(), 1);
  for (const int64_t block : {12288L, kMiB, 3 * kMiB, 64 * kMiB}) {
    for (const int depth : {1, 200}) {
      for (const bool single_submit : {false, true}) {
        SCOPED_TRACE(::testing::Message() << block << " x " << depth << ", " << single_submit);
        ShardFile::Options options = Options(kBytes);
        options.aio = {block, depth, 2, single_submit};
        options.memory = {read.buffer.span()};
        ASSERT_MADE(file, Make(options));
        ASSERT_EQ(Write(*file, 0, written.buffer.span()), absl::OkStatus());
        std::memset(read.buffer.data(), 0, static_cast<size_t>(kBytes));
        ASSERT_EQ(Read(*file, 0, read.buffer.span()), absl::OkStatus());
        EXPECT_TRUE(Same(written.buffer.span(), read.buffer.span()));
      }
    }
  }
}

TEST_P(ShardFileTest, RandomTransfersAgreeWithAModelInMemory) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  constexpr int64_t kBytes = 16 * kMiB;
  constexpr int64_t kUnits = kBytes / ShardFile::kAlignment;
  constexpr size_t kTransfers = 16;
  const PinnedMemory model = Memory(kBytes), memory = Memory(kBytes);
  ShardFile::Options options = Options(kBytes);
  options.memory = {memory.buffer.span().first(static_cast<size_t>(kBytes / 2))};
  ASSERT_MADE(file, Make(options));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 12; ++round) {
    // Cuts the file into parts. Each part is written, read or left unchanged.
    std::vector<int64_t> cuts = {0, kUnits};
    while (cuts.size() <= kTransfers) cuts.push_back(static_cast<int64_t>(random() % kUnits));
    std::sort(cuts.begin(), cuts.end());
    std::deque<IoTransfer> transfers(kTransfers);
    std::vector<size_t> order;
    std::vector<bool> is_read(kTransfers);
    for (size_t i = 0; i < kTransfers; ++i) {
      const int64_t offset = cuts[i] * ShardFile::kAlignment;
      const int64_t bytes = (cuts[i + 1] - cuts[i]) * ShardFile::kAlignment;
      std::byte* const data = memory.buffer.data() + offset;
      order.push_back(i);
      const uint64_t kind = random() % 3;
      is_read[i] = kind == 0;
      if (kind == 0) {
        std::memset(data, 0x5a, static_cast<size_t>(bytes));
        file->StartRead(transfers[i], offset, data, bytes);
      } else if (kind == 1) {
        FillRandomly({data, static_cast<size_t>(bytes)}, random());
        std::memcpy(model.buffer.data() + offset, data, static_cast<size_t>(bytes));
        file->StartWrite(transfers[i], offset, data, bytes);
      }
    }
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) {
      ASSERT_EQ(file->Wait(transfers[i]), absl::OkStatus());
      EXPECT_TRUE(transfers[i].done());
      const auto offset = static_cast<size_t>(cuts[i] * ShardFile::kAlignment);
      const auto bytes = static_cast<size_t>((cuts[i + 1] - cuts[i]) * ShardFile::kAlignment);
      if (is_read[i]) {
        ASSERT_TRUE(Same(memory.buffer.span().subspan(offset, bytes),
                         model.buffer.span().subspan(offset, bytes)));
      }
    }
  }
}

TEST_P(ShardFileTest, MoreMayBeStartedThanTheQueueIsDeep) {
  constexpr int64_t kEach = 3 * 4096;
  constexpr int64_t kCount = 200;
  ShardFile::Options options = Options(kEach * kCount);
  options.aio = {4096, 2, 1, false};
  ASSERT_MADE(file, Make(options));
  const PinnedMemory written = Memory(kEach * kCount), read = Memory(kEach * kCount);
  FillRandomly(written.buffer.span(), 2);
  std::deque<IoTransfer> transfers(kCount);
  for (const bool write : {true, false}) {
    for (size_t i = 0; i < kCount; ++i) {
      const int64_t at = static_cast<int64_t>(i) * kEach;
      write ? file->StartWrite(transfers[i], at, written.buffer.data() + at, kEach)
            : file->StartRead(transfers[i], at, read.buffer.data() + at, kEach);
    }
    for (IoTransfer& transfer : transfers) EXPECT_EQ(file->Wait(transfer), absl::OkStatus());
  }
  EXPECT_TRUE(Same(written.buffer.span(), read.buffer.span()));
}

TEST_P(ShardFileTest, OneThreadReadsWhileAnotherWrites) {
  constexpr int64_t kHalf = 4 * kMiB;
  ASSERT_MADE(file, Make(Options(2 * kHalf)));
  const PinnedMemory first = Memory(kHalf), second = Memory(kHalf);
  const PinnedMemory read = Memory(kHalf);
  FillRandomly(first.buffer.span(), 3);
  FillRandomly(second.buffer.span(), 4);
  ASSERT_EQ(Write(*file, 0, first.buffer.span()), absl::OkStatus());
  std::thread writer([&] {
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(Write(*file, kHalf, second.buffer.span()), absl::OkStatus());
    }
  });
  for (int i = 0; i < 20; ++i) {
    std::memset(read.buffer.data(), 0, static_cast<size_t>(kHalf));
    EXPECT_EQ(Read(*file, 0, read.buffer.span()), absl::OkStatus());
    EXPECT_TRUE(Same(first.buffer.span(), read.buffer.span()));
  }
  writer.join();
  EXPECT_EQ(Read(*file, kHalf, read.buffer.span()), absl::OkStatus());
  EXPECT_TRUE(Same(second.buffer.span(), read.buffer.span()));
}

TEST_P(ShardFileTest, ThreadThatStartedATransferMayEnd) {
  ASSERT_MADE(file, Make(Options(8 * kMiB)));
  const PinnedMemory written = Memory(8 * kMiB), read = Memory(8 * kMiB);
  FillRandomly(written.buffer.span(), 5);
  IoTransfer transfer;
  std::thread([&] { file->StartWrite(transfer, 0, written.buffer.data(), 8 * kMiB); }).join();
  ASSERT_EQ(file->Wait(transfer), absl::OkStatus());
  ASSERT_EQ(Read(*file, 0, read.buffer.span()), absl::OkStatus());
  EXPECT_TRUE(Same(written.buffer.span(), read.buffer.span()));
}

TEST_P(ShardFileTest, TransfersAllocateNothing) {
  constexpr int64_t kBytes = 2 * kMiB;
  ASSERT_MADE(file, Make(Options(kBytes)));
  const PinnedMemory memory = Memory(kBytes);
  IoTransfer reading, writing;
  int64_t before = 0;
  for (int i = 0; i < 30; ++i) {
    if (i == 2) before = Allocations();
    file->StartWrite(writing, 0, memory.buffer.data(), kBytes / 2);
    file->StartRead(reading, kBytes / 2, memory.buffer.data() + kBytes / 2, kBytes / 2);
    EXPECT_TRUE(file->Wait(writing).ok());
    EXPECT_TRUE(file->Wait(reading).ok());
  }
  EXPECT_EQ(Allocations() - before, 0);
}

TEST_P(ShardFileTest, DestructorsAwaitTransfersUnderWay) {
  const PinnedMemory memory = Memory(8 * kMiB);
  ASSERT_MADE(file, Make(Options(8 * kMiB)));
  {
    IoTransfer transfer;
    file->StartWrite(transfer, 0, memory.buffer.data(), 8 * kMiB);
  }
  EXPECT_EQ(file->bytes_written(), 8 * kMiB);
  IoTransfer transfer;
  file->StartWrite(transfer, 0, memory.buffer.data(), 8 * kMiB);
  file.reset();
  EXPECT_TRUE(transfer.done());
}

TEST_P(ShardFileTest, TransfersThatCannotBeAreRefused) {
  ASSERT_MADE(file, Make(Options(kMiB)));
  const PinnedMemory memory = Memory(2 * kMiB);
  const auto write = [&](int64_t offset, int64_t skip, int64_t bytes) {
    IoTransfer transfer;
    file->StartWrite(transfer, offset, memory.buffer.data() + skip, bytes);
    return file->Wait(transfer).code();
  };
  EXPECT_EQ(write(512, 0, 4096), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(write(0, 8, 4096), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(write(0, 0, 100), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(write(-4096, 0, 4096), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(write(0, 0, -4096), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(write(kMiB, 0, 4096), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(write(0, 0, kMiB + 4096), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(write(kMiB, 0, 0), absl::StatusCode::kOk);
  EXPECT_EQ(write(0, 0, kMiB), absl::StatusCode::kOk);
}

TEST_P(ShardFileTest, OptionsThatCannotBeAreRefused) {
  const auto code = [&](auto change) {
    ShardFile::Options options = Options(kMiB);
    change(options);
    return ShardFile::Create(options).status().code();
  };
  constexpr auto kRefused = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](auto& o) { o.aio.block_bytes = 1000; }), kRefused);
  EXPECT_EQ(code([](auto& o) { o.aio.block_bytes = 0; }), kRefused);
  EXPECT_EQ(code([](auto& o) { o.aio.queue_depth = 0; }), kRefused);
  EXPECT_EQ(code([](auto& o) { o.bytes = -1; }), kRefused);
  EXPECT_EQ(code([](auto& o) { o.directories.clear(); }), kRefused);
  EXPECT_EQ(code([](auto& o) { o.directories[0] = "/proc/nowhere"; }), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Make(Options(0)) != nullptr || IsSkipped());
}

// The system's own answers; the first write is short.
TEST_P(ShardFileTest, AWriteThatIsCutShortAndThenRefusedFailsAndKeepsItsBeginning) {
  constexpr int64_t kBlock = 64 << 10, kBytes = 2 * kBlock, kFits = kBlock + 8192;
  ASSERT_MADE(file, Make(Options(kBytes)));
  const PinnedMemory written = Memory(kBytes), read = Memory(kBytes);
  FillRandomly(written.buffer.span(), 6);
  {
    const FullDisk full(kFits);
    const absl::Status status = Write(*file, 0, written.buffer.span());
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted,
                                 "cannot write 57344 bytes at offset 73728 of", scratch_.path(),
                                 "File too large"));
  }
  EXPECT_EQ(file->bytes_written(), kFits);
  ASSERT_EQ(Read(*file, 0, read.buffer.span()), absl::OkStatus());
  EXPECT_TRUE(Same(written.buffer.span().first(kFits), read.buffer.span().first(kFits)));
  EXPECT_EQ(Write(*file, 0, written.buffer.span()), absl::OkStatus());
}

TEST_P(ShardFileTest, TransfersOpenNothingAndNothingIsOpenAtTheEnd) {
  const PinnedMemory memory = Memory(kMiB);
  const auto before = OpenFiles();
  ASSERT_MADE(file, Make(Options(kMiB)));
  {
    // UndefinedBehaviorSanitizer, which comes with it, opens a pipe to look at an object.
#if !defined(__SANITIZE_ADDRESS__)
    const int next = dup(STDERR_FILENO);
    ASSERT_GE(next, 0);
    close(next);
    const Limited none(RLIMIT_NOFILE, static_cast<rlim_t>(next));
    ASSERT_LT(dup(STDERR_FILENO), 0);
#endif
    EXPECT_EQ(Write(*file, 0, memory.buffer.span()), absl::OkStatus());
    EXPECT_EQ(Read(*file, 0, memory.buffer.span()), absl::OkStatus());
  }
  EXPECT_NE(OpenFiles(), before);
  file.reset();
  EXPECT_EQ(OpenFiles(), before);
}

TEST_P(ShardFileTest, TransfersBypassTheCacheIfTheFileSystemAllowsIt) {
  ASSERT_MADE(file, Make(Options(kMiB)));
  const std::string probe = FirstPath() + ".probe";
  const FileHandle direct(open(probe.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600));
  const PinnedMemory block = Memory(4096);
  const bool allowed =
      direct.is_open() && pwrite(direct.get(), block.buffer.data(), 4096, 0) == 4096;
  std::filesystem::remove(probe);
  int files = 0;
  for (const auto& [descriptor, path] : OpenFiles()) {
    if (!path.starts_with(scratch_.path()) || descriptor == direct.get()) continue;
    ++files;
    EXPECT_EQ((fcntl(descriptor, F_GETFL) & O_DIRECT) != 0, allowed) << path;
  }
  EXPECT_EQ(files, GetParam().directories);
  EXPECT_THAT(file->description(), HasSubstr(allowed ? "O_DIRECT" : "page cache"));
}

// Whether the system refuses to register anything of that kind with a ring, as a seccomp profile
// may.
bool RefusesToRegister(unsigned kind, const void* first) {
  io_uring_params parameters = {};
  const FileHandle ring(static_cast<int>(syscall(SYS_io_uring_setup, 1, &parameters)));
  return ring.is_open() && syscall(SYS_io_uring_register, ring.get(), kind, first, 1) != 0;
}

using UringFileTest = OnEveryBackend;
INSTANTIATE_TEST_SUITE_P(Backends, UringFileTest, ::testing::ValuesIn(Backends(IoBackend::kUring)),
                         NameOf);

// Other pages take its address; the registered ones are the old pages.
TEST_P(UringFileTest, RegisteredMemoryIsUsed) {
  // A huge page and a part of one, and a span of less than one page. Both are well below the 8 MiB
  // that an ordinary user may lock, even while the system still counts the memory of the test
  // before.
  constexpr size_t kLeft = 128 << 10, kFirst = (2 << 20) + kLeft;
  constexpr int64_t kBytes = kFirst + kLeft;
  const auto map = [](void* at, int flags) {
    return mmap(at, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  };
  void* const mapped = map(nullptr, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const auto unmap = [](void* at) { munmap(at, kBytes); };
  const std::unique_ptr<void, decltype(unmap)> owner(mapped, unmap);
  const std::span<std::byte> memory(static_cast<std::byte*>(mapped), kBytes);
  const std::span<std::byte> spans[] = {memory.first(kFirst), memory.subspan(kFirst)};
  FillRandomly(memory, 9);
  const PinnedMemory expected = Memory(kBytes), read = Memory(kBytes);
  std::memcpy(expected.buffer.data(), memory.data(), kBytes);
  ShardFile::Options options = Options(kBytes);
  options.memory = {spans[1], spans[0]};
  ASSERT_MADE(file, Make(options));
  // Unregistered memory would be the new pages, so the test needs registered memory.
  if (!absl::StrContains(file->description(), "registered buffers")) {
    if (HasMemlockLimit()) GTEST_SKIP() << "RLIMIT_MEMLOCK leaves too little for these buffers";
    const iovec page = {memory.data(), 4096};
    if (RefusesToRegister(IORING_REGISTER_BUFFERS, &page))
      GTEST_SKIP() << "no memory may be registered here";
    FAIL() << "may be registered, and is not: " << file->description();
  }
  ASSERT_EQ(map(mapped, MAP_FIXED), mapped);
  // A request that crosses the border of two buffers uses neither of them.
  const auto each = [&](auto transfer) {
    for (size_t at = 0; at < kBytes; at += 64 << 10) {
      const std::span<std::byte> block = memory.subspan(at, 64 << 10);
      EXPECT_EQ(transfer(static_cast<int64_t>(at), block), absl::OkStatus()) << at;
    }
  };
  each([&](int64_t at, auto block) { return Write(*file, at, block); });
  ASSERT_EQ(Read(*file, 0, read.buffer.span()), absl::OkStatus());
  EXPECT_TRUE(Same(read.buffer.span(), expected.buffer.span()));
  each([&](int64_t at, auto block) { return Read(*file, at, block); });
  EXPECT_TRUE(std::all_of(memory.begin(), memory.end(), [](auto b) { return b == std::byte{0}; }));
}

// The files' descriptors become another file's; the registered ones are the old files.
TEST_P(UringFileTest, RegisteredFilesAreUsed) {
  const PinnedMemory written = Memory(kMiB), read = Memory(kMiB);
  FillRandomly(written.buffer.span(), 10);
  ASSERT_MADE(file, Make(Options(kMiB)));
  const int any = STDERR_FILENO;  // no limit of memory applies to it
  if (RefusesToRegister(IORING_REGISTER_FILES, &any))
    GTEST_SKIP() << "no file may be registered here";
  std::vector<FileHandle> true_ones;
  std::vector<int> descriptors;
  const FileHandle other(open((scratch_.path() + "/other").c_str(), O_RDWR | O_CREAT, 0600));
  for (const auto& [descriptor, path] : OpenFiles()) {
    if (!path.starts_with(scratch_.path()) || !path.ends_with("(deleted)")) continue;
    true_ones.emplace_back(dup(descriptor));
    descriptors.push_back(descriptor);
    ASSERT_EQ(dup2(other.get(), descriptor), descriptor);
  }
  EXPECT_EQ(static_cast<int>(descriptors.size()), GetParam().directories);
  EXPECT_EQ(Write(*file, 0, written.buffer.span()), absl::OkStatus());
  EXPECT_EQ(Read(*file, 0, read.buffer.span()), absl::OkStatus());
  EXPECT_TRUE(Same(written.buffer.span(), read.buffer.span()));
  EXPECT_EQ(std::filesystem::file_size(scratch_.path() + "/other"), 0u);
  for (size_t i = 0; i < descriptors.size(); ++i)
    ASSERT_EQ(dup2(true_ones[i].get(), descriptors[i]), descriptors[i]);
}

TEST_P(ShardFileTest, SaysHowItReachesTheDisk) {
  const PinnedMemory memory = Memory(kMiB);
  ShardFile::Options options = Options(kMiB);
  options.memory = {memory.buffer.span()};
  ASSERT_MADE(file, Make(options));
  EXPECT_EQ(file->backend(), GetParam().backend);
  EXPECT_THAT(file->description(),
              HasSubstr(GetParam().backend == IoBackend::kUring ? "io_uring" : "threads"));
}

}  // namespace
}  // namespace ebb::testing
