// Ranges of the calling thread that a profiler shows above what the thread enqueues in them: NVTX's, in
// the domain "ebb". Nothing where Ebb is built without CUDA; while no profiler is attached a call is one
// look at a pointer.
#pragma once

namespace ebb::profiler {

// Until the Pop that belongs to it. NVTX copies the name.
void Push(const char* name);
void Pop();

// In NVTX's place, for tests; null: NVTX. Not while a range is open.
struct Sink {
  void (*push)(const char* name);
  void (*pop)();
};
void SetSink(const Sink* sink);

}  // namespace ebb::profiler
