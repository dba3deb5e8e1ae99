#include "ebb/runtime/device/cuda/order_notes.h"

namespace ebb::order_notes {

void HostRecord(cudaStream_t, const CpuEvent::Place&) {}
void WaitForHost(cudaStream_t, const CpuEvent::Place&) {}
void HostPassed(const CpuEvent::Place&) {}
void HostCopy(cudaStream_t, const void*, const void*, int64_t) {}

}  // namespace ebb::order_notes
