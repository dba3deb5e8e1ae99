// Ranges of the calling thread, which a profiler shows above the work that the thread enqueues in
// them. They are NVTX's, in the domain "ebb". They do nothing in a build without CUDA. While no
// profiler is attached a call reads one pointer.
#pragma once

namespace ebb::profiler {

// Begins a range, which its Pop ends. NVTX copies the name.
void Push(const char* name);
void Pop();

// Replaces NVTX, for tests; null: NVTX. Set it while no range is open.
struct Sink {
  void (*push)(const char* name);
  void (*pop)();
};
void SetSink(const Sink* sink);

}  // namespace ebb::profiler
