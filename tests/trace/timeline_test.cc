// The timeline: what its file holds after appends from threads and processes.
#include "ebb/runtime/trace/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <thread>

#include "tests/status.h"
#include "tests/trace/trace_events.h"

namespace ebb::testing::timeline_test {
namespace {

using ::testing::HasSubstr;

class TimelineTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(Timeline::Create(path_).ok()); }
  void TearDown() override { unlink(path_.c_str()); }

  // A timeline with `spans` spans of rank `rank`, on two tracks in turn.
  static std::unique_ptr<const Timeline> Filled(int rank, int spans) {
    auto timeline = std::make_unique<Timeline>(
        Timeline::Options{.rank = rank, .name = "engine", .spans_max = 4096});
    timeline->AddTrack("compute");
    timeline->AddTrack("gather");
    for (int i = 0; i < spans; ++i) {
      timeline->Add({.operation = "gather",
                     .subject = "block0",
                     .track = i % 2,
                     .begin_ns = 1000 * i,
                     .end_ns = 1000 * i + 999,
                     .step = i,
                     .bytes = 4 * i});
    }
    return timeline;
  }

  TraceTracks Read() const {
    absl::StatusOr<TraceTracks> tracks = ReadTraceEvents(path_);
    EXPECT_TRUE(tracks.ok()) << tracks.status();
    return tracks.ok() ? *std::move(tracks) : TraceTracks();
  }
  std::string Text() const {
    std::ifstream file(path_);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  const std::string path_ = ::testing::TempDir() + "timeline_test." + std::to_string(getpid()) +
                            "." + ::testing::UnitTest::GetInstance()->current_test_info()->name() +
                            ".json";
};

size_t Spans(const TraceTracks& tracks) {
  size_t count = 0;
  for (const auto& [id, track] : tracks) count += track.spans.size();
  return count;
}

TEST_F(TimelineTest, IsAnEmptyArrayBeforeAnyAppend) {
  EXPECT_EQ(Text(), "[\n]\n");
  EXPECT_TRUE(Read().empty());
}

TEST_F(TimelineTest, KeepsNamesTimesStepsAndBytes) {
  Timeline timeline({.rank = 3, .name = "actor"});
  EXPECT_EQ(timeline.AddTrack("compute"), 0);
  EXPECT_EQ(timeline.AddTrack("reduce"), 1);
  timeline.Add({.operation = "reduce",
                .subject = "block7",
                .track = 1,
                .begin_ns = 1234567890123,
                .end_ns = 1234567890130,
                .step = 12,
                .bytes = 4096});
  timeline.Add({.operation = "norm", .track = 0, .begin_ns = 5, .end_ns = 5});
  ASSERT_TRUE(timeline.AppendTo(path_).ok());
  const TraceTracks tracks = Read();
  ASSERT_EQ(tracks.size(), 2u);
  const TraceTrack& compute = tracks.at({3, 0});
  EXPECT_EQ(compute.process, "actor rank 3");
  EXPECT_EQ(compute.name, "compute");
  ASSERT_EQ(compute.spans.size(), 1u);
  EXPECT_EQ(compute.spans[0].name, "norm");
  EXPECT_EQ(compute.spans[0].begin_ns, 5);
  EXPECT_EQ(compute.spans[0].end_ns, 5);
  const TraceTrack& reduce = tracks.at({3, 1});
  EXPECT_EQ(reduce.name, "reduce");
  ASSERT_EQ(reduce.spans.size(), 1u);
  EXPECT_EQ(reduce.spans[0].name, "reduce block7");
  EXPECT_EQ(reduce.spans[0].category, "reduce");
  EXPECT_EQ(reduce.spans[0].begin_ns, 1234567890123);
  EXPECT_EQ(reduce.spans[0].end_ns, 1234567890130);
  EXPECT_EQ(reduce.spans[0].step, 12);
  EXPECT_EQ(reduce.spans[0].bytes, 4096);
  EXPECT_THAT(Text(), HasSubstr(R"("ts":1234567890.123,"dur":0.007)"));
}

TEST_F(TimelineTest, SpansOfAnEvaluationHaveItsNumberAndNoStep) {
  Timeline timeline({});
  timeline.AddTrack("compute");
  timeline.Add({.operation = "forward",
                .subject = "block0",
                .begin_ns = 1,
                .end_ns = 2,
                .evaluation = 3,
                .bytes = 4});
  ASSERT_TRUE(timeline.AppendTo(path_).ok());
  const TraceSpan span = Read().at({0, 0}).spans.at(0);
  EXPECT_EQ(span.name, "evaluation: forward block0");
  EXPECT_EQ(span.category, "forward");
  EXPECT_EQ(span.step, 0);
  EXPECT_EQ(span.evaluation, 3);
  EXPECT_EQ(span.bytes, 4);
  EXPECT_THAT(Text(), HasSubstr(R"("args":{"evaluation":3,"bytes":4})"));
}

TEST_F(TimelineTest, IsValidAfterEveryAppend) {
  size_t spans = 0;
  for (int rank = 0; rank < 4; ++rank) {
    const int more = rank * rank * 400;  // none, or more than a text buffer
    ASSERT_TRUE(Filled(rank, more)->AppendTo(path_).ok());
    spans += static_cast<size_t>(more);
    EXPECT_EQ(Spans(Read()), spans);
  }
}

// A span is recorded when it ends, after those inside it; Perfetto needs it before them.
TEST_F(TimelineTest, OrdersNestedSpansFromTheOutside) {
  Timeline timeline({});
  timeline.AddTrack("compute");
  timeline.Add({.operation = "inner", .begin_ns = 10, .end_ns = 20});
  timeline.Add({.operation = "outer", .begin_ns = 10, .end_ns = 30});
  timeline.Add({.operation = "earlier", .begin_ns = 1, .end_ns = 10});
  ASSERT_TRUE(timeline.AppendTo(path_).ok());
  const std::vector<TraceSpan> spans = Read().at({0, 0}).spans;
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(spans[0].name, "earlier");
  EXPECT_EQ(spans[1].name, "outer");
  EXPECT_EQ(spans[2].name, "inner");
}

TEST_F(TimelineTest, TakesSpansFromManyThreads) {
  constexpr int kThreads = 4, kSpans = 500;
  Timeline timeline({.spans_max = kThreads * kSpans});
  for (int i = 0; i < kThreads; ++i) timeline.AddTrack("thread " + std::to_string(i));
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&timeline, thread] {
      for (int i = 0; i < kSpans; ++i) {
        timeline.Add(
            {.operation = "copy", .track = thread, .begin_ns = i, .end_ns = i + 1, .step = i});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(timeline.AppendTo(path_).ok());
  const TraceTracks tracks = Read();
  EXPECT_EQ(timeline.dropped(), 0);
  for (int thread = 0; thread < kThreads; ++thread) {
    std::set<int64_t> steps;
    for (const TraceSpan& span : tracks.at({0, thread}).spans) steps.insert(span.step);
    EXPECT_EQ(steps.size(), size_t{kSpans});
  }
}

TEST_F(TimelineTest, CanBeAppendedWhileOthersAdd) {
  Timeline timeline({.spans_max = 1 << 14});
  timeline.AddTrack("compute");
  std::thread other([&timeline] {
    for (int i = 0; i < 1 << 14; ++i) {
      timeline.Add({.operation = "copy", .begin_ns = i, .end_ns = i + 1});
    }
  });
  EXPECT_TRUE(timeline.AppendTo(path_).ok());
  other.join();
  EXPECT_LE(Spans(Read()), size_t{1} << 14);
}

TEST_F(TimelineTest, CountsAndMentionsDroppedSpans) {
  Timeline timeline({.spans_max = 2});
  timeline.AddTrack("compute");
  for (int i = 0; i < 5; ++i) timeline.Add({.operation = "step", .begin_ns = i, .end_ns = i});
  EXPECT_EQ(timeline.dropped(), 3);
  ASSERT_TRUE(timeline.AppendTo(path_).ok());
  EXPECT_EQ(Read().at({0, 0}).spans.size(), 2u);
  EXPECT_THAT(Text(), HasSubstr("3 spans dropped"));
}

TEST_F(TimelineTest, EscapesNames) {
  const std::string odd = "a\"b\\c\n\x01 \xc3\xa9";
  Timeline timeline({.name = odd});
  timeline.AddTrack(odd);
  timeline.Add({.operation = "\t{", .subject = odd});
  timeline.Add({.operation = "latin1", .subject = "\xe9"});
  ASSERT_TRUE(timeline.AppendTo(path_).ok());
  const TraceTrack track = Read().at({0, 0});
  EXPECT_EQ(track.process, odd + " rank 0");
  EXPECT_EQ(track.name, odd);
  EXPECT_EQ(track.spans.at(0).name, "\t{ " + odd);
  EXPECT_EQ(track.spans.at(1).name, "latin1 \xef\xbf\xbd");
}

TEST_F(TimelineTest, TakesAppendsFromManyThreads) {
  constexpr int kRanks = 6, kSpans = 1000;
  std::barrier start(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::unique_ptr<const Timeline> timeline = Filled(rank, kSpans);
      start.arrive_and_wait();
      EXPECT_TRUE(timeline->AppendTo(path_).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Spans(Read()), size_t{kRanks} * kSpans);
}

TEST_F(TimelineTest, TakesAppendsFromManyProcesses) {
  constexpr int kRanks = 4, kSpans = 300;
  for (int rank = 0; rank < kRanks; ++rank) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) _exit(Filled(rank, kSpans)->AppendTo(path_).ok() ? 0 : 1);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    int status = -1;
    ASSERT_GT(wait(&status), 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(Spans(Read()), size_t{kRanks} * kSpans);
}

TEST_F(TimelineTest, StartsAnew) {
  ASSERT_TRUE(Filled(0, 10)->AppendTo(path_).ok());
  ASSERT_TRUE(Timeline::Create(path_).ok());
  EXPECT_EQ(Text(), "[\n]\n");
}

TEST_F(TimelineTest, NamesAPathThatCannotBeWritten) {
  const std::string nowhere = path_ + ".d/timeline.json";
  for (const absl::Status& status : {Timeline::Create(nowhere), Filled(0, 1)->AppendTo(nowhere)}) {
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kNotFound, nowhere, "No such file or directory"));
  }
}

}  // namespace
}  // namespace ebb::testing::timeline_test
