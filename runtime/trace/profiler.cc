#include "ebb/runtime/trace/profiler.h"

#include <atomic>

#include "ebb/runtime/trace/nvtx.h"

namespace ebb::profiler {
namespace {

constexpr Sink kNvtx = {.push = &PushNvtx, .pop = &PopNvtx};
std::atomic<const Sink*> sink{&kNvtx};

}  // namespace

void Push(const char* name) {
  sink.load(std::memory_order_relaxed)->push(name);
}
void Pop() {
  sink.load(std::memory_order_relaxed)->pop();
}
void SetSink(const Sink* given) {
  sink = given == nullptr ? &kNvtx : given;
}

}  // namespace ebb::profiler
