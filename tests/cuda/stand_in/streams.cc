// Streams, events, and the work on streams.
#include "streams.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

#include "calls.h"
#include "graph.h"
#include "order.h"
#include "state.h"

namespace ebb::stand_in {
namespace {

constexpr int kLeastPriority = 0, kGreatestPriority = -5;

thread_local std::atomic<int> host_waits{0};
thread_local int spinning_waits = 0;
std::atomic<int> host_functions_enqueued{0};
std::mutex host_functions;  // one at a time, on whatever stream
thread_local bool in_host_function = false;
std::mutex streams_mutex;
std::set<cudaStream_t> streams;            // of all devices
std::array<std::atomic<int>, 64> loading;  // threads that load a kernel, by device
std::atomic<int> launch_queue{0};          // 0: endless

[[noreturn]] void EndFor(const char* what) {
  std::fprintf(stderr, "stand-in for CUDA: %s\n", what);
  std::abort();
}
bool AwaitsCollective(cudaStream_t stream) {
  return stream->collectives > stream->collectives_seen;
}

// Whether the event is behind a collective that the host has not seen ending. `sees`: from now on
// it has.
bool AwaitsCollective(cudaEvent_t event, bool sees) {
  if (event->collectives == 0) return false;
  const std::scoped_lock lock(streams_mutex);
  const cudaStream_t stream = event->stream;
  if (!streams.contains(stream) || event->collectives <= stream->collectives_seen) return false;
  if (sees) stream->collectives_seen = event->collectives.load();
  return true;
}

void SeePassed(cudaEvent_t event) {
  AwaitsCollective(event, /*sees=*/true);
  NotePassed(event);
}

}  // namespace

void AwaitOnHost(const Event& event) {
  if (!event.Passed()) ++host_waits;
  event.Wait();
}

ebb::Device& Host() {
  static ebb::Device device = ebb::Device::Cpu(1);
  return device;
}

const std::atomic<int>& HostWaits() {
  return host_waits;
}
int HostFunctions() {
  return host_functions_enqueued;
}
void ForgetHostFunctions() {
  host_functions_enqueued = 0;
}
void AwaitDevice() {
  if (Lost() != cudaSuccess) return;
  std::vector<Event> ends;
  {
    const std::scoped_lock lock(streams_mutex);
    for (const cudaStream_t stream : streams) {
      if (stream->device != CurrentDevice()) continue;
      const std::scoped_lock turn(stream->mutex);
      stream->stream.Record(ends.emplace_back(*Host().NewEvent()));
    }
  }
  for (const Event& end : ends) AwaitOnHost(end);
}
int SpinningWaits() {
  return spinning_waits;
}
void HoldUntilHostWaits(cudaStream_t stream) {
  EnqueueKernel(stream, Task([waits = &host_waits, before = host_waits.load()] {
                  while (waits->load() == before) std::this_thread::yield();
                }));
}
bool HasPriority(cudaStream_t stream) {
  return stream->has_priority;
}
void RequireNoHostFunction() {
  if (in_host_function) EndFor("a call of CUDA or NCCL in a host function");
}
void NoteCollective(cudaStream_t stream) {
  ++stream->collectives;
}
void AwaitInDriver(cudaStream_t stream) {
  {
    const std::scoped_lock lock(stream->mutex);
    if (AwaitsCollective(stream)) {
      EndFor(
          "a copy of pageable memory waits inside the driver for a collective, which may wait for "
          "another thread's call");
    }
    stream->stream.Record(stream->end);
  }
  const std::unique_lock turn(ContextLock());
  AwaitOnHost(stream->end);
}
void TakePlaceInQueue(cudaStream_t stream) {
  if (launch_queue == 0) return;
  if (stream->launched - stream->ended >= launch_queue) {
    if (AwaitsCollective(stream)) {
      EndFor(
          "a launch waits inside the driver for room behind a collective, which may wait for "
          "another thread's call");
    }
    const std::unique_lock turn(ContextLock());
    while (stream->launched - stream->ended >= launch_queue) std::this_thread::yield();
  }
  ++stream->launched;
}
void GivePlaceBack(cudaStream_t stream) {
  if (launch_queue == 0) return;
  stream->stream.Enqueue([stream] { ++stream->ended; });
}
void SetLaunchQueue(int most) {
  launch_queue = most;
}
void LoadWhileOthersWait() {
  std::atomic<int>& loads = loading[static_cast<size_t>(CurrentDevice())];
  ++loads;
  const std::unique_lock turn(ContextLock());
  AwaitDevice();
  --loads;
}
void RequireNoLoading() {
  const std::shared_lock turn(ContextLock(), std::try_to_lock);
  if (!turn.owns_lock() && loading[static_cast<size_t>(CurrentDevice())] > 0) {
    EndFor(
        "a collective is called while the first launch of a kernel waits for the device, where "
        "another rank's collective may wait for it");
  }
}
void TakeTime(cudaStream_t stream, int64_t ns) {
  stream->taken_ns += ns;
}
void EnqueueKernel(cudaStream_t stream, void (*run)(void*), void* argument,
                   void (*release)(void*)) {
  if (KeepTask(stream, Task([run, argument] { run(argument); }), argument, release)) return;
  EnqueueKernel(stream, Task([run, argument, release] {
                  run(argument);
                  if (release != nullptr) release(argument);
                }));
}
void EnqueueKernel(cudaStream_t stream, const Task& kernel) {
  UseContext();
  if (KeepTask(stream, kernel, nullptr, nullptr)) return;
  const std::scoped_lock lock(stream->mutex);
  TakePlaceInQueue(stream);
  stream->stream.Enqueue(kernel);
  GivePlaceBack(stream);
}

}  // namespace ebb::stand_in

using namespace ebb::stand_in;  // what the C functions below use

extern "C" {

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = kLeastPriority;
  *greatest = kGreatestPriority;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (const auto failure = FailureBesideCaptures("cudaStreamCreateWithPriority")) return failure;
  if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;
  auto made = Host().NewStream("stand-in");
  if (!made.ok()) return cudaErrorMemoryAllocation;
  *stream = new CUstream_st{.stream = *std::move(made),
                            .end = *Host().NewEvent(),
                            .has_priority = priority == kGreatestPriority,
                            .device = CurrentDevice(),
                            .mutex = {}};
  Count(Thing::kStream, 1);
  const std::scoped_lock lock(streams_mutex);
  streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  UseContext();
  Forget(stream);
  {
    const std::scoped_lock lock(streams_mutex);
    streams.erase(stream);
  }
  delete stream;
  Count(Thing::kStream, -1);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const auto failure = FailureOutsideOfCapture("cudaStreamQuery", stream)) return failure;
  const std::scoped_lock lock(stream->mutex);
  stream->stream.Record(stream->end);
  if (!stream->end.Passed()) return cudaErrorNotReady;
  stream->collectives_seen = stream->collectives.load();
  NotePassed(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const auto failure = FailureOutsideOfCapture("cudaStreamSynchronize", stream)) return failure;
  int64_t collectives = 0;
  {
    const std::scoped_lock lock(stream->mutex);
    stream->stream.Record(stream->end);
    collectives = stream->collectives;
  }
  AwaitOnHost(stream->end);
  stream->collectives_seen = collectives;
  NotePassed(stream);
  return Lost();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const auto failure = Called("cudaStreamWaitEvent")) return failure;
  if (const auto refused = RefuseWhileCapturing(stream, cudaErrorStreamCaptureIsolation))
    return refused;
  const bool awaits = AwaitsCollective(event, /*sees=*/false);
  const std::scoped_lock lock(stream->mutex);
  NoteWait(stream, event);
  if (awaits) ++stream->collectives;
  stream->stream.Wait(event->event);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (const auto failure = FailureBesideCaptures("cudaEventCreateWithFlags")) return failure;
  if ((flags & ~(cudaEventDisableTiming | cudaEventBlockingSync)) != 0)
    return cudaErrorInvalidValue;
  *event = new CUevent_st{.event = *Host().NewEvent(),
                          .timed = (flags & cudaEventDisableTiming) == 0,
                          .sleeps = (flags & cudaEventBlockingSync) != 0};
  Count(Thing::kEvent, 1);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  UseContext();
  Forget(event);
  if (event->timed) event->event.Wait();  // it is about to note the time
  delete event;
  Count(Thing::kEvent, -1);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const auto failure = FailureOutsideOfCapture("cudaEventRecord", stream)) return failure;
  const std::scoped_lock lock(stream->mutex);
  NoteRecord(stream, event);
  event->stream = stream;
  event->collectives = stream->collectives.load();
  if (event->timed) {
    stream->stream.Enqueue([stream, event] {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      event->ns = std::chrono::nanoseconds(now).count() + stream->taken_ns;
    });
  }
  stream->stream.Record(event->event);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if (const auto failure = FailureBesideCaptures("cudaEventElapsedTime")) return failure;
  if (!begin->timed || !end->timed) return cudaErrorInvalidResourceHandle;
  if (!begin->event.Passed() || !end->event.Passed()) return cudaErrorNotReady;
  *milliseconds = static_cast<float>(end->ns - begin->ns) / 1e6f;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const auto failure = FailureBesideCaptures("cudaEventQuery")) return failure;
  if (!event->event.Passed()) return cudaErrorNotReady;
  SeePassed(event);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const auto failure = FailureBesideCaptures("cudaEventSynchronize")) return failure;
  if (!event->sleeps) ++spinning_waits;
  AwaitOnHost(event->event);
  SeePassed(event);
  return Lost();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  if (const auto failure = FailureOutsideOfCapture("cudaLaunchHostFunc", stream)) return failure;
  ++host_functions_enqueued;
  const std::scoped_lock lock(stream->mutex);
  stream->stream.Enqueue([function, argument] {
    const std::scoped_lock turn(host_functions);
    if (Lost() != cudaSuccess) return;
    in_host_function = true;
    function(argument);
    in_host_function = false;
  });
  return cudaSuccess;
}

}  // extern "C"
