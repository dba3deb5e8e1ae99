#include "ebb/runtime/trace/nvtx.h"

namespace ebb::profiler {

void PushNvtx(const char*) {}
void PopNvtx() {}

}  // namespace ebb::profiler
