#include "report/resident.h"

#include "ebb/runtime/trace/resident_set.h"

namespace ebb::gpt {

ResidentMemory::ResidentMemory() {
  if (const std::optional<ResidentSet> now = ReadResidentSet()) before_bytes_ = now->bytes;
}

void ResidentMemory::Add(const Engine& engine, DeviceKind device) {
  int64_t bytes = engine.program().own_bytes();
  for (const MemoryRow& row : engine.memory()) {
    if (row.tier == Tier::kCpu || (row.tier == Tier::kDevice && device == DeviceKind::kCpu))
      bytes += static_cast<int64_t>(row.predicted_bytes);
  }
  engines_bytes_ += bytes;
}

std::optional<ResidentRow> ResidentMemory::Row() const {
  const std::optional<ResidentSet> now = ReadResidentSet();
  if (!before_bytes_ || !now) return std::nullopt;
  return ResidentRow{.before_bytes = *before_bytes_,
                     .predicted_bytes = *before_bytes_ + engines_bytes_,
                     .peak_bytes = now->peak_bytes};
}

}  // namespace ebb::gpt
