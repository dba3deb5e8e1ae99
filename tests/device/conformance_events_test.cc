// Events of every kind of device: the order that they make, and their lifetime.
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <vector>

#include "conformance.h"

namespace ebb::conformance_events_test {
namespace {

TEST_P(DeviceConformance, WaitOrdersTwoStreams) {
  Gate gate;
  std::atomic<int> value{0};
  int seen = -1;
  Event event = NewEvent();
  Stream producer = NewStream(), consumer = NewStream();
  producer.Enqueue([&] {
    gate.Wait();
    value.store(7);
  });
  producer.Record(event);
  consumer.Wait(event);
  consumer.Enqueue([&] { seen = value.load(); });
  EXPECT_FALSE(event.Passed());
  gate.Open();
  consumer.WaitIdle();
  EXPECT_TRUE(event.Passed());
  EXPECT_EQ(seen, 7);
}

TEST_P(DeviceConformance, HostWaitsForAnEvent) {
  std::atomic<int> value{0};
  Event event = NewEvent();
  Stream stream = NewStream();
  stream.Enqueue([&] { value.store(1); });
  stream.Record(event);
  event.Wait();
  EXPECT_EQ(value.load(), 1);
}

TEST_P(DeviceConformance, EventThatWasNeverRecordedHasPassed) {
  Event event = NewEvent();
  EXPECT_TRUE(event.Passed());
  event.Wait();
  Stream stream = NewStream();
  stream.Wait(event);
  stream.WaitIdle();
}

TEST_P(DeviceConformance, WaitIsForTheRecordBeforeItNotForALaterOne) {
  if (!tasks_may_wait()) GTEST_SKIP() << "the host tasks of several streams may share a thread";
  Gate later;
  Event event = NewEvent();
  Stream recorder = NewStream(), waiter = NewStream();
  std::atomic<int> ran{0};
  recorder.Record(event);
  waiter.Wait(event);
  waiter.Enqueue([&] { ran.store(1); });
  recorder.Enqueue([&] { later.Wait(); });
  recorder.Record(event);
  waiter.WaitIdle();  // would hang if it waited for the second record
  EXPECT_EQ(ran.load(), 1);
  EXPECT_FALSE(event.Passed());
  later.Open();
  event.Wait();
}

TEST_P(DeviceConformance, RecordOnAnotherStreamDoesNotReleaseEarlierWaiters) {
  Gate gate;
  std::atomic<bool> first_done{false};
  bool waited = false;
  Event event = NewEvent();
  Stream first = NewStream(), second = NewStream(), waiter = NewStream();
  first.Enqueue([&] {
    gate.Wait();
    first_done.store(true);
  });
  first.Record(event);
  waiter.Wait(event);
  waiter.Enqueue([&] { waited = first_done.load(); });
  second.Record(event);
  event.Wait();  // for the second stream only
  EXPECT_FALSE(first_done.load());
  gate.Open();
  waiter.WaitIdle();
  EXPECT_TRUE(waited);
}

TEST_P(DeviceConformance, EventMayBeDestroyedOnceWaitsAreEnqueued) {
  Gate gate;
  std::atomic<bool> done{false};
  bool waited = false;
  Stream recorder = NewStream(), waiter = NewStream();
  {
    Event event = NewEvent();
    recorder.Enqueue([&] {
      gate.Wait();
      done.store(true);
    });
    recorder.Record(event);
    waiter.Wait(event);
  }
  waiter.Enqueue([&] { waited = done.load(); });
  gate.Open();
  waiter.WaitIdle();
  EXPECT_TRUE(waited);
}

TEST_P(DeviceConformance, EventOutlivesItsStreamAndItsDevice) {
  std::optional<Device> device = *GetParam().make();
  Event event = *device->NewEvent();
  {
    Stream stream = NewStream(*device, "short");
    stream.Record(event);
  }
  {
    Stream stream = NewStream(*device, "next");  // may inherit the first one's state
    EXPECT_TRUE(event.Passed());
    stream.Wait(event);
  }
  device.reset();
  event.Wait();
  EXPECT_TRUE(event.Passed());
}

TEST_P(DeviceConformance, EventsAreRecordedAgainAndAgain) {
  int64_t ping = 0,
          pong = 0;  // one stream writes each, the other reads it; only the events order them
  bool ordered = true;
  Event pinged = NewEvent(), ponged = NewEvent();
  Stream first = NewStream(), second = NewStream();
  for (int i = 1; i <= 2000; ++i) {
    first.Wait(ponged);
    first.Enqueue([&, i] {
      ordered = ordered && pong == i - 1;
      ping = i;
    });
    first.Record(pinged);
    second.Wait(pinged);
    second.Enqueue([&, i] {
      ordered = ordered && ping == i;
      pong = i;
    });
    second.Record(ponged);
  }
  second.WaitIdle();
  first.WaitIdle();
  EXPECT_TRUE(ordered);
  EXPECT_EQ(pong, 2000);
}

TEST_P(DeviceConformance, SixtyFourStreamsAtOnce) {
  constexpr int kStreams = 64, kLaps = 20;
  int64_t passes = 0;  // passed from stream to stream by the events
  std::vector<Stream> streams;
  std::vector<Event> events;
  for (int i = 0; i < kStreams; ++i) {
    streams.push_back(NewStream("a name longer than the system keeps"));
    events.push_back(NewEvent());
  }
  for (int turn = 0; turn < kLaps * kStreams; ++turn) {
    const auto here = static_cast<size_t>(turn % kStreams),
               before = static_cast<size_t>((turn + kStreams - 1) % kStreams);
    streams[here].Wait(events[before]);
    streams[here].Enqueue([&passes] { ++passes; });
    streams[here].Record(events[here]);
  }
  for (Stream& stream : streams) stream.WaitIdle();
  EXPECT_EQ(passes, kLaps * kStreams);
}

}  // namespace
}  // namespace ebb::conformance_events_test
