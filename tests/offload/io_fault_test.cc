// What the system may answer to a request, injected: each becomes the right data or a clear Status,
// and nothing hangs.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <map>

#include "backends.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/io_queue.h"
#include "ebb/runtime/device/wait_point.h"
#include "faulty_queue.h"

namespace ebb::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBytes = int64_t{3} << 20;

class IoFaultTest : public OnEveryBackend {
 protected:
  std::unique_ptr<ShardFile> MakeWith(FaultyQueue::Fault fault, size_t hold = 1) {
    ShardFile::Options options = Options(kBytes);
    options.wrap_queue = WithFaults(std::move(fault), hold);
    return Make(options);
  }
  // Writes and reads the whole file.
  void ExpectRoundTrip(ShardFile& file) {
    const PinnedMemory written = Memory(kBytes), read = Memory(kBytes);
    FillRandomly(written.buffer.span(), 7);
    ASSERT_EQ(Write(file, 0, written.buffer.span()), absl::OkStatus());
    ASSERT_EQ(Read(file, 0, read.buffer.span()), absl::OkStatus());
    EXPECT_EQ(std::memcmp(written.buffer.data(), read.buffer.data(), kBytes), 0);
    EXPECT_EQ(file.bytes_written(), kBytes);
    EXPECT_EQ(file.bytes_read(), kBytes);
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, IoFaultTest, ::testing::ValuesIn(Backends()), NameOf);

TEST_P(IoFaultTest, FailingDiskIsDataLossAndTheNextTransferGoesOn) {
  int requests = 0;
  const auto file = MakeWith([&](IoRequest&) -> std::optional<int64_t> {
    if (++requests == 5) return -EIO;
    return std::nullopt;
  });
  const PinnedMemory memory = Memory(kBytes);
  const absl::Status status = Write(*file, 0, memory.buffer.span());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(status.message(), HasSubstr("cannot write 65536 bytes at offset "));
  EXPECT_THAT(status.message(), HasSubstr(scratch_.path()));
  EXPECT_THAT(status.message(), HasSubstr("Input/output error"));
  EXPECT_EQ(Write(*file, 0, memory.buffer.span()), absl::OkStatus());
}

TEST_P(IoFaultTest, DiskThatFillsUpIsResourceExhausted) {
  const auto file = MakeWith([](IoRequest& request) -> std::optional<int64_t> {
    if (request.write && request.offset >= kBytes / 6) return -ENOSPC;
    return std::nullopt;
  });
  const PinnedMemory memory = Memory(kBytes);
  const absl::Status status = Write(*file, 0, memory.buffer.span());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("No space left on device"));
  EXPECT_EQ(Read(*file, 0, memory.buffer.span()), absl::OkStatus());
}

TEST_P(IoFaultTest, TransferThatFailsInEveryBlockEnds) {
  const auto file = MakeWith([](IoRequest&) -> std::optional<int64_t> { return -EIO; });
  const PinnedMemory memory = Memory(kBytes);
  std::deque<IoTransfer> transfers(6);
  for (IoTransfer& transfer : transfers) {
    file->StartWrite(transfer, 0, memory.buffer.data(), kBytes);
  }
  for (IoTransfer& transfer : transfers) {
    EXPECT_EQ(file->Wait(transfer).code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(file->bytes_written(), 0);
}

TEST_P(IoFaultTest, ShortTransfersAreContinued) {
  int requests = 0;
  const auto file = MakeWith([&](IoRequest& request) -> std::optional<int64_t> {
    if (++requests % 2 == 0 && request.bytes > 8192) {
      request.bytes = request.bytes / 3 / 4096 * 4096;
    }
    return std::nullopt;
  });
  ExpectRoundTrip(*file);
  EXPECT_GT(requests, 2 * kBytes / (64 << 10));
}

TEST_P(IoFaultTest, ShortTransfersOfNoWholeBlockAreRepeated) {
  int requests = 0;
  const auto file = MakeWith([&](IoRequest&) -> std::optional<int64_t> {
    if (++requests % 3 == 0) return 0 + 512 * (requests % 2);
    return std::nullopt;
  });
  const PinnedMemory memory = Memory(kBytes);
  EXPECT_EQ(Write(*file, 0, memory.buffer.span()), absl::OkStatus());
}

TEST_P(IoFaultTest, WhatTheSystemAsksToRepeatIsRepeated) {
  int requests = 0;
  const auto file = MakeWith([&](IoRequest&) -> std::optional<int64_t> {
    switch (++requests % 5) {
      case 1:
        return -EINTR;
      case 2:
        return -EAGAIN;
      case 3:
        return -ENOMEM;
      default:
        return std::nullopt;
    }
  });
  ExpectRoundTrip(*file);
}

TEST_P(IoFaultTest, RepeatingEndsAtSomeTime) {
  const auto file = MakeWith([](IoRequest& request) -> std::optional<int64_t> {
    if (request.offset == 0) return -EAGAIN;
    return std::nullopt;
  });
  const PinnedMemory memory = Memory(kBytes);
  const absl::Status status = Write(*file, 0, memory.buffer.span());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("queue_depth"));
}

// Long enough for pauses.
TEST_P(IoFaultTest, AShortSeriesOfRefusalsIsSurvived) {
  std::map<int64_t, int> refused;  // by place
  const auto file = MakeWith([&](IoRequest& request) -> std::optional<int64_t> {
    if (request.offset < kBytes / 6 && ++refused[request.offset] % 25 != 0) return -EAGAIN;
    return std::nullopt;
  });
  ExpectRoundTrip(*file);
  EXPECT_GE(refused.size(), 2u);
}

// All that is in flight is repeated for one second together, and what is behind it hardly at all.
TEST_P(IoFaultTest, ASystemThatAsksToRepeatForEverEndsAllTransfersTogether) {
  constexpr int kTransfers = 12;
  int refused = 0;
  const auto file = MakeWith([&](IoRequest&) -> std::optional<int64_t> {
    ++refused;
    return -EAGAIN;
  });
  const PinnedMemory memory = Memory(kBytes);
  std::deque<IoTransfer> transfers(kTransfers);
  for (IoTransfer& transfer : transfers) {
    file->StartWrite(transfer, 0, memory.buffer.data(), kBytes);
  }
  for (IoTransfer& transfer : transfers) {
    EXPECT_EQ(file->Wait(transfer).code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(file->bytes_written(), 0);
  // A pause is of a millisecond, and of all that was refused at once.
  const int depth = Options(kBytes).aio.queue_depth * GetParam().directories;
  EXPECT_LE(refused, depth * (1000 + 17 * (kTransfers + 1)));
}

// Of a transfer that has failed the rest is not tried again.
TEST_P(IoFaultTest, WhatBelongsToAFailedTransferIsNotRepeated) {
  int requests = 0;
  // Told latest first, so the first one's failure is known when the others come a second time.
  const auto file = MakeWith(
      [&](IoRequest&) -> std::optional<int64_t> { return ++requests == 1 ? -EIO : -EAGAIN; },
      FaultyQueue::kAllInFlight);
  const PinnedMemory memory = Memory(kBytes);
  EXPECT_EQ(Write(*file, 0, memory.buffer.span()).code(), absl::StatusCode::kDataLoss);
  EXPECT_LE(requests, 2 * Options(kBytes).aio.queue_depth * GetParam().directories);
}

TEST_P(IoFaultTest, CompletionsMayComeInAnyOrder) {
  // All that are in flight, as long as there is more to do.
  const size_t depth = Options(kBytes).aio.queue_depth * Options(kBytes).directories.size();
  ASSERT_EQ(kBytes / (64 << 10) % static_cast<int64_t>(depth), 0);
  const auto file = MakeWith([](IoRequest&) { return std::optional<int64_t>(); }, depth);
  ExpectRoundTrip(*file);
}

TEST_P(IoFaultTest, QueueThatCannotBeMadeIsAnErrorOfCreate) {
  ShardFile::Options options = Options(kBytes);
  options.wrap_queue = [](IoListener&, const auto&) -> absl::StatusOr<std::unique_ptr<IoQueue>> {
    return absl::UnavailableError("no queue");
  };
  EXPECT_EQ(ShardFile::Create(options).status(), absl::UnavailableError("no queue"));
  EXPECT_TRUE(scratch_.Entries().empty());
}

TEST(UringQueueTest, FullSubmissionQueueIsEmptiedAndFilledAgain) {
  struct Listener final : IoListener {
    void Completed(std::span<const IoCompletion> completions) override {
      for (const IoCompletion& completion : completions) {
        if (completion.result == 4096) moved.fetch_add(1);
        over.fetch_add(1);
      }
    }
    void Announce() override { changed.Notify(); }
    std::atomic<int> moved{0}, over{0};
    WaitPoint changed;
  } listener;
  const Scratch scratch;
  const FileHandle file(open((scratch.path() + "/file").c_str(), O_RDWR | O_CREAT, 0600));
  const int descriptor = file.get();
  IoQueueOptions options;
  options.files = {&descriptor, 1};
  options.depth = 500;
  options.ring_entries = 2;
  auto queue = MakeUringQueue(options, listener);
  if (absl::IsUnavailable(queue.status())) GTEST_SKIP() << queue.status();
  ASSERT_TRUE(queue.ok()) << queue.status();
  const PinnedMemory memory = Memory(4096);
  std::vector<IoRequest> requests(500);
  std::vector<IoRequest*> pointers;
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i] = {true, 0, static_cast<int64_t>(i) * 4096, memory.buffer.data(), 4096, nullptr};
    pointers.push_back(&requests[i]);
  }
  (*queue)->Submit(pointers);
  listener.changed.Await([&] { return listener.over.load() == 500; });
  EXPECT_EQ(listener.moved.load(), 500);
}

// The second request goes through a pipe, so that whoever is announced to can see it.
TEST(UringQueueTest, WhatACompletionSubmitsIsWithTheSystemBeforeAnyoneIsWoken) {
  struct Listener final : IoListener {
    void Completed(std::span<const IoCompletion> completions) override {
      if (completions[0].request != first) return;
      IoRequest* const request = &second;
      queue->Submit({&request, 1});
    }
    void Announce() override {
      if (over.load()) return;
      pollfd readable = {.fd = pipe_end, .events = POLLIN, .revents = 0};
      submitted = poll(&readable, 1, /*milliseconds=*/10'000) == 1;
      over.store(true);
      changed.Notify();
    }
    IoQueue* queue = nullptr;
    const IoRequest* first = nullptr;
    IoRequest second;
    int pipe_end = -1;
    bool submitted = false;
    std::atomic<bool> over{false};
    WaitPoint changed;
  } listener;
  const Scratch scratch;
  const FileHandle file(open((scratch.path() + "/file").c_str(), O_RDWR | O_CREAT, 0600));
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const FileHandle reads(ends[0]), writes(ends[1]);
  const int descriptors[] = {file.get(), writes.get()};
  IoQueueOptions options;
  options.files = descriptors;
  const PinnedMemory memory = Memory(4096);
  auto queue = MakeUringQueue(options, listener);
  if (absl::IsUnavailable(queue.status())) GTEST_SKIP() << queue.status();
  ASSERT_TRUE(queue.ok()) << queue.status();
  IoRequest first = {true, 0, 0, memory.buffer.data(), 4096, nullptr};
  listener.queue = queue->get();
  listener.first = &first;
  listener.second = {true, 1, 0, memory.buffer.data(), 1, nullptr};
  listener.pipe_end = reads.get();
  IoRequest* const pointer = &first;
  (*queue)->Submit({&pointer, 1});
  listener.changed.Await([&] { return listener.over.load(); });
  EXPECT_TRUE(listener.submitted);
}

TEST(UringQueueTest, FilesThatAreNotThereFailTheirRequests) {
  struct Listener final : IoListener {
    void Completed(std::span<const IoCompletion> completions) override {
      result = completions[0].result;
      over.store(true);
    }
    void Announce() override { changed.Notify(); }
    int64_t result = 0;
    std::atomic<bool> over{false};
    WaitPoint changed;
  } listener;
  const int descriptor = 1 << 20;
  IoQueueOptions options;
  options.files = {&descriptor, 1};
  auto queue = MakeUringQueue(options, listener);
  if (absl::IsUnavailable(queue.status())) GTEST_SKIP() << queue.status();
  const PinnedMemory memory = Memory(4096);
  IoRequest request = {true, 0, 0, memory.buffer.data(), 4096, nullptr};
  IoRequest* const pointer = &request;
  (*queue)->Submit({&pointer, 1});
  listener.changed.Await([&] { return listener.over.load(); });
  EXPECT_EQ(listener.result, -EBADF);
}

}  // namespace
}  // namespace ebb::testing
