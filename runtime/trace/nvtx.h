// Ranges of NVTX; nothing in a build without CUDA.
#pragma once

namespace ebb::profiler {

void PushNvtx(const char* name);
void PopNvtx();

}  // namespace ebb::profiler
