#include "ebb/runtime/trace/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace ebb::profiler {
namespace {

nvtxDomainHandle_t Domain() {
  static nvtxDomainHandle_t const domain = nvtxDomainCreateA("ebb");
  return domain;
}

}  // namespace

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

}  // namespace ebb::profiler
