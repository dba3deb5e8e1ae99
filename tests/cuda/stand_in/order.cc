#include "order.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "ebb/runtime/device/cuda/order_observer.h"
#include "graph.h"

namespace ebb::stand_in {
namespace {

// How many operations of each stream, by its number, come before.
using Clock = std::map<uint64_t, uint64_t>;

struct Stream {
  uint64_t number = 0;
  Clock clock;
};

struct Access {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  bool writes = false;
  uint64_t stream = 0, time = 0;
  const char* what = "";
};

struct Allocation {
  const std::byte* end = nullptr;
  std::vector<Access> accesses;  // accesses that a later one may have to wait for
};

struct State {
  std::mutex mutex;
  std::map<const void*, Stream> streams;
  std::map<const void*, Clock> events;
  // Each host stream's knowledge at its last records, by ticket. Knowledge only grows: a wait for a
  // record that is no longer kept counts as a wait for a later one, which knows more.
  std::map<const void*, std::map<int64_t, Clock>> host_streams;
  std::map<const std::byte*, Allocation> allocations;
  uint64_t streams_seen = 0;
  std::vector<std::string> races;
};

State& All() {
  static auto* const state = new State;  // never destroyed: streams may outlive static objects
  return *state;
}

// The calling thread's clock: the work that it has waited for.
Clock& HostClock() {
  thread_local Clock clock;
  return clock;
}

void Join(Clock& clock, const Clock& other) {
  for (const auto& [stream, time] : other) {
    uint64_t& known = clock[stream];
    if (known < time) known = time;
  }
}

Stream& Of(cudaStream_t stream) {
  Stream& found = All().streams[stream];
  if (found.number == 0) found.number = ++All().streams_seen;
  return found;
}

bool Follows(const Clock& clock, const Access& earlier) {
  const auto known = clock.find(earlier.stream);
  return known != clock.end() && known->second >= earlier.time;
}

void Note(Allocation& allocation, const std::byte* base, const Access& access, const Clock& clock) {
  std::erase_if(allocation.accesses, [&](const Access& earlier) {
    const bool overlaps = earlier.begin < access.end && access.begin < earlier.end;
    if (!overlaps) return false;
    const bool follows = Follows(clock, earlier);
    if ((earlier.writes || access.writes) && !follows && All().races.size() < 20) {
      All().races.push_back(
          std::string(access.what) + " on stream " + std::to_string(access.stream) +
          (access.writes ? " writes" : " reads") + " bytes " + std::to_string(access.begin - base) +
          " to " + std::to_string(access.end - base) + " of an allocation beside " + earlier.what +
          " on stream " + std::to_string(earlier.stream) + ", which " +
          (earlier.writes ? "writes" : "reads") + " bytes " + std::to_string(earlier.begin - base) +
          " to " + std::to_string(earlier.end - base));
    }
    const bool covered = access.begin <= earlier.begin && earlier.end <= access.end;
    return covered && follows && (access.writes || !earlier.writes);
  });
  allocation.accesses.push_back(access);
}

// Notes the accesses of the next operation of stream `number`; `clock` is that stream's.
void NoteAll(uint64_t number, Clock& clock, const char* what, std::span<const Touched> touched) {
  const uint64_t time = ++clock[number];
  // Accesses of one operation do not race with each other.
  for (const bool writes : {false, true}) {
    for (const Touched& each : touched) {
      const auto* const begin = static_cast<const std::byte*>(each.data);
      if (each.writes != writes || each.bytes == 0) continue;
      auto allocation = All().allocations.upper_bound(begin);
      if (allocation == All().allocations.begin()) continue;
      --allocation;
      if (begin >= allocation->second.end) continue;
      Note(allocation->second, allocation->first,
           {.begin = begin,
            .end = begin + each.bytes,
            .writes = writes,
            .stream = number,
            .time = time,
            .what = what},
           clock);
    }
  }
}

std::atomic<bool> watching{false};

}  // namespace

bool WatchesOrder() {
  return watching;
}

void NoteAllocation(const void* data, size_t bytes) {
  if (!watching) return;
  const std::scoped_lock lock(All().mutex);
  const auto* const begin = static_cast<const std::byte*>(data);
  All().allocations[begin] = {.end = begin + bytes, .accesses = {}};
}

void ForgetAllocation(const void* data) {
  const std::scoped_lock lock(All().mutex);
  All().allocations.erase(static_cast<const std::byte*>(data));
}

void NoteTouch(cudaStream_t stream, const char* what, std::span<const Touched> touched) {
  if (!watching || KeepTouched(stream, what, touched)) return;
  const std::scoped_lock lock(All().mutex);
  Stream& of = Of(stream);
  Join(of.clock, HostClock());
  NoteAll(of.number, of.clock, what, touched);
}

void NoteHostTouch(const char* what, std::span<const Touched> touched) {
  if (!watching) return;
  thread_local uint64_t number = 0;
  const std::scoped_lock lock(All().mutex);
  if (number == 0) number = ++All().streams_seen;
  NoteAll(number, HostClock(), what, touched);
}

void NoteRecord(cudaStream_t stream, cudaEvent_t event) {
  if (!watching) return;
  const std::scoped_lock lock(All().mutex);
  Stream& of = Of(stream);
  Join(of.clock, HostClock());
  All().events[event] = of.clock;
}

void NoteWait(cudaStream_t stream, cudaEvent_t event) {
  if (!watching) return;
  const std::scoped_lock lock(All().mutex);
  Join(Of(stream).clock, All().events[event]);
}

void NotePassed(cudaStream_t stream) {
  if (!watching) return;
  const std::scoped_lock lock(All().mutex);
  Join(HostClock(), Of(stream).clock);
}

void NotePassed(cudaEvent_t event) {
  if (!watching) return;
  const std::scoped_lock lock(All().mutex);
  Join(HostClock(), All().events[event]);
}

namespace {

Clock KnownAt(const CpuEvent::Place& place) {
  const std::map<int64_t, Clock>& records = All().host_streams[place.tickets];
  const auto record = records.lower_bound(place.ticket);
  return record == records.end() ? Clock() : record->second;
}

class HostStreams : public OrderObserver {
 public:
  void HostRecord(cudaStream_t crossing, const CpuEvent::Place& place) override {
    constexpr size_t kKept = 1024;
    const std::scoped_lock lock(All().mutex);
    Stream& of = Of(crossing);
    Join(of.clock, HostClock());
    std::map<int64_t, Clock>& records = All().host_streams[place.tickets];
    records[place.ticket] = of.clock;
    if (records.size() > kKept) records.erase(records.begin());
  }
  void WaitForHost(cudaStream_t waiter, const CpuEvent::Place& place) override {
    const std::scoped_lock lock(All().mutex);
    Join(Of(waiter).clock, KnownAt(place));
  }
  void HostPassed(const CpuEvent::Place& place) override {
    const std::scoped_lock lock(All().mutex);
    Join(HostClock(), KnownAt(place));
  }
  void HostCopy(cudaStream_t crossing, const void* destination, const void* source,
                int64_t bytes) override {
    const Touched touched[] = {Reads(source, source == nullptr ? 0 : bytes),
                               Writes(destination, bytes)};
    NoteTouch(crossing, source == nullptr ? "zeroing by the host" : "a copy by the host", touched);
  }
};

}  // namespace

void WatchOrder() {
  static HostStreams host_streams;
  OrderObserver::Current() = &host_streams;
  watching = true;
}

void Forget(cudaStream_t stream) {
  const std::scoped_lock lock(All().mutex);
  All().streams.erase(stream);
}

void Forget(cudaEvent_t event) {
  const std::scoped_lock lock(All().mutex);
  All().events.erase(event);
}

std::vector<std::string> TakeRaces() {
  const std::scoped_lock lock(All().mutex);
  return std::exchange(All().races, {});
}

}  // namespace ebb::stand_in
