#include "ebb/runtime/trace/profiler.h"

#include <atomic>

#if EBB_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace ebb::profiler {
namespace {

#if EBB_NVTX
nvtxDomainHandle_t Domain() {
  static nvtxDomainHandle_t const domain = nvtxDomainCreateA("ebb");
  return domain;
}

void PushNvtx(const char* name) {
  nvtxEventAttributes_t attributes = {};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(Domain(), &attributes);
}
void PopNvtx() {
  nvtxDomainRangePop(Domain());
}
#else
void PushNvtx(const char*) {}
void PopNvtx() {}
#endif

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
