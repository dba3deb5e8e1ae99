// All answers that the system may give to a request, injected: each becomes the right data or a
// clear Status, and nothing hangs.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "ebb/offload/file_handle.h"
#include "ebb/offload/io_queue.h"
#include "ebb/runtime/device/wait_point.h"
#include "io_fault_fixture.h"
#include "tests/status.h"

namespace ebb::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Backends, IoFaultTest, ::testing::ValuesIn(Backends()), NameOf);
INSTANTIATE_TEST_SUITE_P(Driven, IoFaultTest, ::testing::Values(Driven()), NameOf);

TEST_P(IoFaultTest, FailingDiskIsDataLossAndTheNextTransferGoesOn) {
  int requests = 0;
  ASSERT_MADE(file, MakeWith([&](IoRequest&) -> std::optional<int64_t> {
                if (++requests == 5) return -EIO;
                return std::nullopt;
              }));
  const absl::Status status = Write(*file, 0, memory_.buffer.span());
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, "cannot write 65536 bytes at offset ",
                               scratch_.path(), "Input/output error"));
  EXPECT_EQ(Write(*file, 0, memory_.buffer.span()), absl::OkStatus());
}

TEST_P(IoFaultTest, DiskThatFillsUpIsResourceExhausted) {
  ASSERT_MADE(file, MakeWith([](IoRequest& request) -> std::optional<int64_t> {
                if (request.write && request.offset >= kBytes / 6) return -ENOSPC;
                return std::nullopt;
              }));
  const absl::Status status = Write(*file, 0, memory_.buffer.span());
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, "No space left on device"));
  EXPECT_EQ(Read(*file, 0, memory_.buffer.span()), absl::OkStatus());
}

TEST_P(IoFaultTest, TransferThatFailsInEveryBlockEnds) {
  ASSERT_MADE(file, MakeWith([](IoRequest&) -> std::optional<int64_t> { return -EIO; }));
  std::deque<IoTransfer> transfers(6);
  for (IoTransfer& transfer : transfers) {
    file->StartWrite(transfer, 0, memory_.buffer.data(), kBytes);
  }
  for (IoTransfer& transfer : transfers) {
    EXPECT_EQ(file->Wait(transfer).code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(file->bytes_written(), 0);
}

TEST_P(IoFaultTest, FailuresThatNoThreadWaitsForLeaveNothing) {
  ASSERT_MADE(file, MakeWith([](IoRequest&) -> std::optional<int64_t> { return -EIO; }));
  {
    IoTransfer goes;
    file->StartWrite(goes, 0, memory_.buffer.data(), kBytes);
  }
  std::deque<IoTransfer> transfers(3);
  for (IoTransfer& transfer : transfers) {
    file->StartRead(transfer, 0, memory_.buffer.data(), kBytes);
  }
  file.reset();
  for (const IoTransfer& transfer : transfers) EXPECT_TRUE(transfer.done());
  EXPECT_THAT(scratch_.Entries(), ::testing::IsEmpty());
}

TEST_P(IoFaultTest, ShortTransfersAreContinued) {
  int requests = 0;
  ASSERT_MADE(file, MakeWith([&](IoRequest& request) -> std::optional<int64_t> {
                if (++requests % 2 == 0 && request.bytes > 8192) {
                  request.bytes = request.bytes / 3 / 4096 * 4096;
                }
                return std::nullopt;
              }));
  ExpectRoundTrip(*file);
  EXPECT_GT(requests, 2 * kBytes / (64 << 10));
}

TEST_P(IoFaultTest, ShortTransfersOfLessThanABlockAreRepeated) {
  int requests = 0;
  ASSERT_MADE(file, MakeWith([&](IoRequest&) -> std::optional<int64_t> {
                if (++requests % 3 == 0) return 0 + 512 * (requests % 2);
                return std::nullopt;
              }));
  EXPECT_EQ(Write(*file, 0, memory_.buffer.span()), absl::OkStatus());
}

TEST_P(IoFaultTest, RequestsAreRepeatedIfTheSystemAsksForIt) {
  int requests = 0;
  ASSERT_MADE(file, MakeWith([&](IoRequest&) -> std::optional<int64_t> {
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
              }));
  ExpectRoundTrip(*file);
}

TEST_P(IoFaultTest, RepeatingEnds) {
  ASSERT_MADE(file, MakeWith([](IoRequest& request) -> std::optional<int64_t> {
                if (request.offset == 0) return -EAGAIN;
                return std::nullopt;
              }));
  const absl::Status status = Write(*file, 0, memory_.buffer.span());
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, "queue_depth"));
}

// Refusals that last long enough for pauses.
TEST_P(IoFaultTest, AShortSeriesOfRefusalsIsSurvived) {
  std::map<int64_t, int> refused;  // by offset
  ASSERT_MADE(file, MakeWith([&](IoRequest& request) -> std::optional<int64_t> {
                if (request.offset < kBytes / 6 && ++refused[request.offset] % 25 != 0)
                  return -EAGAIN;
                return std::nullopt;
              }));
  ExpectRoundTrip(*file);
  EXPECT_GE(refused.size(), 2u);
}

// All requests in flight are repeated during the same second, and later ones hardly at all.
TEST_P(IoFaultTest, ASystemThatAsksToRepeatForEverEndsAllTransfersTogether) {
  constexpr int kTransfers = 12;
  int refused = 0;
  ASSERT_MADE(file, MakeWith([&](IoRequest&) -> std::optional<int64_t> {
                ++refused;
                return -EAGAIN;
              }));
  std::deque<IoTransfer> transfers(kTransfers);
  for (IoTransfer& transfer : transfers) {
    file->StartWrite(transfer, 0, memory_.buffer.data(), kBytes);
  }
  for (IoTransfer& transfer : transfers) {
    EXPECT_EQ(file->Wait(transfer).code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(file->bytes_written(), 0);
  // A pause takes a millisecond, and is for all that was refused at once.
  const int depth = Options(kBytes).aio.queue_depth * GetParam().directories;
  EXPECT_LE(refused, depth * (1000 + 17 * (kTransfers + 1)));
}

// One second for both together.
TEST_P(IoFaultTest, AfterEndlessRefusalsTheNextQueueEndsWithoutAnotherWait) {
  int refused = 0;
  const auto refuse = [&](IoRequest&) -> std::optional<int64_t> {
    return ++refused % 2 == 0 ? -EAGAIN : -EINTR;
  };
  int64_t of_first = 0;
  for (const bool first : {true, false}) {
    ShardFile::Options options = Options(kBytes);
    options.name = first ? "first" : "second";
    options.wrap_queue = WithFaults(refuse, /*hold=*/1, GetParam().own_thread);
    ASSERT_MADE(file, Make(options));
    refused = 0;
    EXPECT_EQ(Write(*file, 0, memory_.buffer.span()).code(), absl::StatusCode::kUnavailable);
    if (first) of_first = refused;
  }
  EXPECT_GT(of_first, 2 * 17 * depth());
  EXPECT_LE(refused, 17 * depth());
}

// The rest of a failed transfer is not tried again.
TEST_P(IoFaultTest, RequestsOfAFailedTransferAreNotRepeated) {
  int requests = 0;
  // Reported latest first, so the first one's failure is known when the others come a second time.
  ASSERT_MADE(file, MakeWith(
                        [&](IoRequest&) -> std::optional<int64_t> {
                          return ++requests == 1 ? -EIO : -EAGAIN;
                        },
                        FaultyQueue::kAllInFlight));
  EXPECT_EQ(Write(*file, 0, memory_.buffer.span()).code(), absl::StatusCode::kDataLoss);
  EXPECT_LE(requests, 2 * Options(kBytes).aio.queue_depth * GetParam().directories);
}

// One second for all that follow one another, even if the same queue reads meanwhile.
TEST_P(IoFaultTest, EndlessRefusalsEndTogetherAlthoughOthersMakeProgress) {
  if (!GetParam().own_thread) GTEST_SKIP() << "two threads use the queue";
  constexpr int kTransfers = 12;
  std::atomic<int> refused = 0;
  ASSERT_MADE(file, MakeWith([&](IoRequest& request) -> std::optional<int64_t> {
                if (!request.write) return std::nullopt;
                ++refused;
                return -EAGAIN;
              }));
  const PinnedMemory written = Memory(kBytes), read = Memory(kBytes);
  std::atomic<bool> over = false;
  std::thread reads([&] {
    while (!over) EXPECT_EQ(Read(*file, 0, read.buffer.span()), absl::OkStatus());
  });
  for (int i = 0; i < kTransfers; ++i)
    EXPECT_EQ(Write(*file, 0, written.buffer.span()).code(), absl::StatusCode::kUnavailable);
  over = true;
  reads.join();
  EXPECT_LE(refused, depth() * (1000 + 17 * (kTransfers + 1)));
}

TEST_P(IoFaultTest, CompletionsMayComeInAnyOrder) {
  // The requests in flight reach the depth while there are more of them.
  const size_t depth = Options(kBytes).aio.queue_depth * Options(kBytes).directories.size();
  ASSERT_EQ(kBytes / (64 << 10) % static_cast<int64_t>(depth), 0);
  ASSERT_MADE(file, MakeWith([](IoRequest&) { return std::optional<int64_t>(); }, depth));
  ExpectRoundTrip(*file);
}

TEST_P(IoFaultTest, AnErrorInAnyOrderOfCompletionsFailsItsTransferAlone) {
  constexpr int64_t kTransfers = 6, kEach = kBytes / kTransfers;
  const PinnedMemory written = Memory(kBytes), read = Memory(kBytes);
  FillRandomly(written.buffer.span(), 8);
  const auto transfer_of = [&](const IoRequest& request) {
    return (request.data - (request.write ? written : read).buffer.data()) / kEach;
  };
  // In order of arrival, so that an immediate answer is first, and in reverse.
  for (const auto& [of_writes, hold] : {std::pair(true, size_t{1}),
                                        {false, 1},
                                        {true, FaultyQueue::kAllInFlight},
                                        {false, FaultyQueue::kAllInFlight}}) {
    // The last block of one transfer, the first of another.
    ASSERT_MADE(file, MakeWith(
                          [&, writes = of_writes](IoRequest& request) -> std::optional<int64_t> {
                            const int64_t transfer = transfer_of(request);
                            const std::byte* const begin =
                                (request.write ? written : read).buffer.data() + transfer * kEach;
                            const bool is_first = request.data == begin;
                            const bool is_last = request.data + request.bytes == begin + kEach;
                            const bool fails =
                                (transfer == 1 && is_last) || (transfer == 4 && is_first);
                            return fails && request.write == writes ? std::optional<int64_t>(-EIO)
                                                                    : std::nullopt;
                          },
                          hold));
    for (const bool write : {true, false}) {
      SCOPED_TRACE(::testing::Message() << (of_writes ? "of writes" : "of reads") << ": " << write);
      std::deque<IoTransfer> transfers(kTransfers);
      for (int64_t i = 0; i < kTransfers; ++i) {
        IoTransfer& transfer = transfers[static_cast<size_t>(i)];
        write ? file->StartWrite(transfer, i * kEach, written.buffer.data() + i * kEach, kEach)
              : file->StartRead(transfer, i * kEach, read.buffer.data() + i * kEach, kEach);
      }
      for (int64_t i = 0; i < kTransfers; ++i) {
        SCOPED_TRACE(i);
        const bool is_hit = i == 1 || i == 4;
        EXPECT_EQ(
            file->Wait(transfers[static_cast<size_t>(i)]).code(),
            write == of_writes && is_hit ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk);
        if (write || is_hit) continue;
        EXPECT_EQ(std::memcmp(written.buffer.data() + i * kEach, read.buffer.data() + i * kEach,
                              static_cast<size_t>(kEach)),
                  0);
      }
    }
  }
}

TEST_P(IoFaultTest, RequestsThatFitTheDepthAreSubmittedTogether) {
  // Counts the requests of each Submit.
  class Counting final : public IoQueue {
   public:
    Counting(std::unique_ptr<IoQueue> inner, std::vector<size_t>& counts)
        : inner_(std::move(inner)), counts_(counts) {}
    void Submit(std::span<IoRequest* const> requests) override {
      if (std::this_thread::get_id() == caller_) counts_.push_back(requests.size());
      inner_->Submit(requests);
    }
    bool Drive() override { return inner_->Drive(); }
    std::string description() const override { return inner_->description(); }

   private:
    const std::unique_ptr<IoQueue> inner_;
    const std::thread::id caller_ = std::this_thread::get_id();
    std::vector<size_t>& counts_;
  };
  std::vector<size_t> counts;
  ShardFile::Options options = Options(kBytes);
  options.wrap_queue =
      [&](IoListener& listener,
          const ShardFile::Options::MakeQueue& make) -> absl::StatusOr<std::unique_ptr<IoQueue>> {
    auto inner = make(listener);
    if (!inner.ok()) return inner.status();
    return std::make_unique<Counting>(*std::move(inner), counts);
  };
  ASSERT_MADE(file, Make(options));
  EXPECT_EQ(Write(*file, 0, memory_.buffer.span()), absl::OkStatus());
  ASSERT_FALSE(counts.empty());
  EXPECT_EQ(static_cast<int64_t>(counts.front()), depth());
}

TEST_P(IoFaultTest, QueueThatCannotBeMadeIsAnErrorOfCreate) {
  ShardFile::Options options = Options(kBytes);
  options.wrap_queue = [](IoListener&, const auto&) -> absl::StatusOr<std::unique_ptr<IoQueue>> {
    return absl::UnavailableError("no queue");
  };
  EXPECT_EQ(ShardFile::Create(options).status(), absl::UnavailableError("no queue"));
  EXPECT_TRUE(scratch_.Entries().empty());
}

TEST(IoQueueTest, FilesThatAreNotThereFailTheirRequests) {
  struct Listener final : IoListener {
    void Completed(std::span<const IoCompletion> completions) override {
      result = completions[0].result;
      over.store(true);
    }
    void Announce() override { changed.Notify(); }
    int64_t result = 0;
    std::atomic<bool> over{false};
    WaitPoint changed;
  };
  const int descriptor = 1 << 20;
  IoQueueOptions options;
  options.files = {&descriptor, 1};
  const PinnedMemory memory = Memory(4096);
  for (const auto make : {MakeUringQueue, MakeThreadQueue}) {
    for (const bool write : {false, true}) {
      Listener listener;
      auto queue = make(options, listener);
      if (absl::IsUnavailable(queue.status())) break;
      ASSERT_TRUE(queue.ok()) << queue.status();
      IoRequest request = {write, 0, 0, memory.buffer.data(), 4096, nullptr};
      IoRequest* const pointer = &request;
      (*queue)->Submit({&pointer, 1});
      listener.changed.Await([&] { return listener.over.load(); });
      EXPECT_EQ(listener.result, -EBADF);
    }
  }
}

}  // namespace
}  // namespace ebb::testing
