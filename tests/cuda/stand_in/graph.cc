#include "graph.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "state.h"

namespace ebb::stand_in {
namespace {

struct Touches {
  const char* what = "";
  std::vector<Touched> touched;
};

struct Node {
  Task task;
  std::vector<Touches> touches;  // noted before the task
  void* argument = nullptr;
  void (*release)(void*) = nullptr;

  explicit Node(const Task& t) : task(t) {}
  Node(Node&& other) noexcept
      : task(other.task),
        touches(std::move(other.touches)),
        argument(other.argument),
        release(std::exchange(other.release, nullptr)) {}
  Node& operator=(Node&&) = delete;
  ~Node() {
    if (release != nullptr) release(argument);
  }
};
using Nodes = std::vector<Node>;

struct Capture {
  std::thread::id thread;
  std::shared_ptr<Nodes> nodes = std::make_shared<Nodes>();
  std::vector<Touches> touches;  // of the next task
  bool spoilt = false;
};

std::mutex mutex;
std::map<cudaStream_t, Capture>& Captured() {
  static auto* const captures = new std::map<cudaStream_t, Capture>;
  return *captures;
}
std::atomic<int> capturing{0};  // capturing streams
std::atomic<int> launches{0};

// Call it with the mutex held. Null: the stream does not capture.
Capture* Of(cudaStream_t stream) {
  const auto found = Captured().find(stream);
  return found == Captured().end() ? nullptr : &found->second;
}

}  // namespace

bool Captures(cudaStream_t stream) {
  if (capturing == 0) return false;
  const std::scoped_lock lock(mutex);
  return Of(stream) != nullptr;
}

cudaError_t CaptureState(cudaStream_t stream) {
  if (capturing == 0) return cudaSuccess;
  const std::scoped_lock lock(mutex);
  const Capture* const capture = Of(stream);
  return capture != nullptr && capture->spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

cudaError_t RefuseWhileCapturing(cudaStream_t stream, cudaError_t error) {
  if (capturing == 0) return cudaSuccess;
  const std::scoped_lock lock(mutex);
  Capture* const capture = Of(stream);
  if (capture == nullptr) return cudaSuccess;
  return std::exchange(capture->spoilt, true) ? cudaErrorStreamCaptureInvalidated : error;
}

cudaError_t RefuseOnCapturingThread() {
  if (capturing == 0) return cudaSuccess;
  const std::scoped_lock lock(mutex);
  cudaError_t result = cudaSuccess;
  for (auto& [stream, capture] : Captured()) {
    if (capture.thread != std::this_thread::get_id()) continue;
    capture.spoilt = true;
    result = cudaErrorStreamCaptureUnsupported;
  }
  return result;
}

bool KeepTouched(cudaStream_t stream, const char* what, std::span<const Touched> touched) {
  if (capturing == 0) return false;
  const std::scoped_lock lock(mutex);
  Capture* const capture = Of(stream);
  if (capture == nullptr) return false;
  capture->touches.push_back({what, {touched.begin(), touched.end()}});
  return true;
}

bool KeepTask(cudaStream_t stream, const Task& task, void* argument, void (*release)(void*)) {
  if (capturing == 0) return false;
  const std::scoped_lock lock(mutex);
  Capture* const capture = Of(stream);
  if (capture == nullptr) return false;
  Node& node = capture->nodes->emplace_back(task);
  node.touches = std::exchange(capture->touches, {});
  node.argument = argument;
  node.release = release;
  return true;
}

int GraphLaunches() {
  return launches;
}
void ForgetGraphLaunches() {
  launches = 0;
}

}  // namespace ebb::stand_in

// Types that CUDA leaves opaque. Nodes outlive both while a launch of them runs.
struct CUgraph_st {
  std::shared_ptr<const ebb::stand_in::Nodes> nodes;
};
struct CUgraphExec_st {
  std::shared_ptr<const ebb::stand_in::Nodes> nodes;
};

extern "C" {

using namespace ebb::stand_in;  // the file's own

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (const auto failure = Called("cudaStreamBeginCapture")) return failure;
  if (mode != cudaStreamCaptureModeThreadLocal) return cudaErrorInvalidValue;  // never used
  const std::scoped_lock lock(mutex);
  if (Of(stream) != nullptr) return cudaErrorIllegalState;
  Captured()[stream].thread = std::this_thread::get_id();
  ++capturing;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const std::scoped_lock lock(mutex);
  Capture* const capture = Of(stream);
  if (capture == nullptr) return cudaErrorIllegalState;
  if (capture->thread != std::this_thread::get_id()) return cudaErrorStreamCaptureWrongThread;
  // The capture ends in any case.
  const Capture ended = std::move(*capture);
  Captured().erase(stream);
  --capturing;
  if (const auto failure = Called("cudaStreamEndCapture")) return failure;
  if (ended.spoilt) return cudaErrorStreamCaptureInvalidated;
  *graph = new CUgraph_st{ended.nodes};
  Count(Thing::kGraph, 1);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = !Captures(stream)                     ? cudaStreamCaptureStatusNone
            : CaptureState(stream) != cudaSuccess ? cudaStreamCaptureStatusInvalidated
                                                  : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  if (const auto failure = RefuseOnCapturingThread()) return failure;
  if (const auto failure = Called("cudaGraphInstantiate")) return failure;
  *made = new CUgraphExec_st{graph->nodes};
  Count(Thing::kGraph, 1);
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t stream) {
  if (const auto failure = RefuseWhileCapturing(stream)) return failure;
  return Called("cudaGraphUpload");
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  if (const auto failure = RefuseWhileCapturing(stream)) return failure;
  if (const auto failure = Called("cudaGraphLaunch")) return failure;
  for (const Node& node : *graph->nodes) {
    for (const Touches& each : node.touches) NoteTouch(stream, each.what, each.touched);
    EnqueueKernel(stream, node.task);
  }
  auto* const kept = new std::shared_ptr(graph->nodes);
  EnqueueKernel(stream, ebb::Task([kept] { delete kept; }));
  ++launches;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  Count(Thing::kGraph, -1);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  Count(Thing::kGraph, -1);
  return cudaSuccess;
}

}  // extern "C"
