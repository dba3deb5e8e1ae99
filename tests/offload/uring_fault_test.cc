// All answers that the system may give to an io_uring ring, injected: each becomes the right data
// or a clear Status, and nothing hangs.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "denied.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/io_queue.h"
#include "ebb/runtime/device/wait_point.h"
#include "io_fault_fixture.h"
#include "tests/status.h"

namespace ebb::testing::uring_fault_test {
namespace {

using ::testing::Each;

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

// The second request goes through a pipe, so that the listener can see it in Announce.
TEST(UringQueueTest, RequestsOfACompletionAreSubmittedBeforeAThreadIsWoken) {
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

// Faults between a ring and the system.
class UringTest : public IoFaultTest {
 protected:
  // Runs `function`. For each io_uring_enter that submits requests, `answer` decides the outcome,
  // as in RunAnswered. `answer` gets the number of requests, and the ring's descriptor. One of them
  // may be the ring's read that waits for wakes.
  static void Run(const std::function<int(uint64_t requests, uint64_t ring)>& answer,
                  const std::function<void()>& function) {
    const auto answers = [&](std::span<const uint64_t, 6> arguments) {
      return arguments[1] == 0 ? 0 : answer(arguments[1], arguments[0]);
    };
    if (!RunAnswered(SYS_io_uring_enter, answers, function))
      GTEST_SKIP() << "no seccomp filter can be set here";
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, UringTest, ::testing::ValuesIn(Backends(IoBackend::kUring)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Driven, UringTest, ::testing::Values(Driven()), NameOf);

// Another thread may drive the ring when it is idle. Before that, debug builds abort.
TEST(UringQueueDeathTest, TheThreadThatSubmitsDrivesUntilItsRequestsAreOver) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  struct Listener final : IoListener {
    void Completed(std::span<const IoCompletion>) override { over = true; }
    void Announce() override {}
    bool over = false;
  } listener;
  const Scratch scratch;
  const FileHandle file(open((scratch.path() + "/file").c_str(), O_RDWR | O_CREAT, 0600));
  const int descriptor = file.get();
  IoQueueOptions options;
  options.files = {&descriptor, 1};
  options.own_thread = false;
  auto queue = MakeUringQueue(options, listener);
  if (absl::IsUnavailable(queue.status())) GTEST_SKIP() << queue.status();
  ASSERT_TRUE(queue.ok()) << queue.status();
  const PinnedMemory memory = Memory(4096);
  IoRequest request = {true, 0, 0, memory.buffer.data(), 4096, nullptr};
  IoRequest* const pointer = &request;
  const auto drive = [&] {
    while (!listener.over) (*queue)->Drive();
  };
  std::thread([&] {
    (*queue)->Submit({&pointer, 1});
    drive();
  }).join();
  listener.over = false;
  (*queue)->Submit({&pointer, 1});
#ifndef NDEBUG
  EXPECT_DEATH(std::thread([&] { (*queue)->Drive(); }).join(), "driver_");
#endif
  drive();
}

TEST_P(UringTest, SubmittingTogetherIsOneSystemCall) {
  for (const bool single_submit : {false, true}) {
    SCOPED_TRACE(single_submit ? "but for each request its own" : "");
    std::vector<uint64_t> calls;
    Run(
        [&](uint64_t requests, uint64_t) {
          calls.push_back(requests);
          return 0;
        },
        [&] {
          ShardFile::Options options = Options(kBytes);
          options.aio.single_submit = single_submit;
          // All requests in flight end together, so that as many are submitted together.
          options.wrap_queue = WithFaults([](IoRequest&) { return std::nullopt; },
                                          static_cast<size_t>(depth()), GetParam().own_thread);
          ASSERT_MADE(file, Make(options));
          EXPECT_EQ(Write(*file, 0, memory_.buffer.span()), absl::OkStatus());
        });
    if (IsSkipped()) return;
    const int64_t blocks = kBytes / (64 << 10);
    const auto full = [&](uint64_t requests) { return requests >= static_cast<uint64_t>(depth()); };
    EXPECT_EQ(std::count_if(calls.begin(), calls.end(), full),
              single_submit ? 0 : blocks / depth());
    if (!single_submit) continue;
    EXPECT_THAT(calls, ::testing::Each(::testing::Le(2u)));
    EXPECT_GE(static_cast<int64_t>(calls.size()), blocks);
  }
}

// A system that is short of memory has such errors.
TEST_P(UringTest, RequestsThatTheSystemTakesLaterSucceed) {
  constexpr int kErrors[] = {EAGAIN, EBUSY, ENOMEM, EINTR};
  int calls = 0;
  Run(
      [&](uint64_t, uint64_t) {
        ++calls;
        return calls % 6 == 0 ? 0 : kErrors[calls % 4];
      },
      [&] {
        ASSERT_MADE(file, Make(Options(kBytes)));
        ExpectRoundTrip(*file);
      });
  if (!IsSkipped()) {
    EXPECT_GE(calls, 3 * 6);
  }
}

// A ring retries once in a millisecond for one second. Later rings retry only a few times each,
// even if another ring of the process reads meanwhile.
TEST_P(UringTest, RingsThatAreRefusedForEverEndTogether) {
  constexpr int kMany = 20'000;  // calls, after which none is refused any more
  for (const auto& [error, another_reads] :
       {std::pair(EAGAIN, false), {EINTR, true}, {EBUSY, true}}) {
    SCOPED_TRACE(::testing::Message() << std::strerror(error) << ' ' << another_reads);
    ForgetRefusals();
    std::atomic<bool> armed = false, reads = true;
    std::atomic<int> calls = 0;
    std::atomic<uint64_t> ring_that_reads = 0;
    Run(
        [&](uint64_t, uint64_t ring) {
          if (!armed) ring_that_reads = ring;
          if (!armed || (another_reads && ring == ring_that_reads)) return 0;
          return ++calls <= kMany ? error : 0;
        },
        [&] {
          const PinnedMemory other_memory = Memory(kBytes);
          std::vector<std::unique_ptr<ShardFile>> files;
          for (const char* name : {"first", "second", "third", "reads"}) {
            ShardFile::Options options = Options(kBytes);
            options.name = name;
            files.push_back(Make(options));
            if (files.back() == nullptr) return;
          }
          const std::unique_ptr<ShardFile> other = std::move(files.back());
          files.pop_back();
          EXPECT_EQ(Write(*other, 0, other_memory.buffer.span()), absl::OkStatus());
          armed = true;
          std::thread reader([&] {
            while (another_reads && reads)
              EXPECT_EQ(Read(*other, 0, other_memory.buffer.span()), absl::OkStatus());
          });
          for (const auto& file : files)
            EXPECT_EQ(Write(*file, 0, memory_.buffer.span()).code(),
                      absl::StatusCode::kUnavailable);
          EXPECT_LE(calls, 1000 + 3 * 17);
          calls = 0;
          ShardFile::Options late = Options(kBytes);
          late.name = "late";
          const absl::Status made = ShardFile::Create(late).status();
          EXPECT_EQ(made.code(), absl::StatusCode::kFailedPrecondition) << made;
          EXPECT_LE(calls, 17);
          reads = false;
          reader.join();
        });
    if (IsSkipped()) return;
  }
}

// With some requests in flight, or none.
TEST_P(UringTest, ASystemThatTakesNoMoreRequestsFailsAllThatCome) {
  for (const int taken : {0, 1}) {
    SCOPED_TRACE(taken);
    std::atomic<bool> armed = false;
    int calls = 0;
    Run([&](uint64_t, uint64_t) { return armed && ++calls > taken ? EIO : 0; },
        [&] {
          ASSERT_MADE(file, Make(Options(kBytes)));
          EXPECT_EQ(Write(*file, 0, memory_.buffer.span()), absl::OkStatus());
          armed = true;
          std::deque<IoTransfer> transfers(3);
          for (int round = 0; round < 2; ++round) {
            for (IoTransfer& transfer : transfers)
              file->StartRead(transfer, 0, memory_.buffer.data(), kBytes);
            for (IoTransfer& transfer : transfers) {
              const absl::Status status = file->Wait(transfer);
              EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, "cannot read",
                                           scratch_.path(), "Input/output error"));
            }
          }
          EXPECT_EQ(Write(*file, 0, memory_.buffer.span()).code(), absl::StatusCode::kDataLoss);
        });
    EXPECT_THAT(scratch_.Entries(), ::testing::IsEmpty());
  }
}

}  // namespace
}  // namespace ebb::testing::uring_fault_test
