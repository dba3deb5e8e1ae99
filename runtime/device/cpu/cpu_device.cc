#include "ebb/runtime/device/cpu/cpu_device.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/cpu/cpu_stream.h"
#include "ebb/runtime/device/cpu/pages.h"

namespace ebb {

CpuDevice::CpuDevice(int threads)
    : team_(std::make_shared<ThreadTeam>(threads)), pool_(std::make_shared<ProgressPool>()) {}

std::string CpuDevice::description() const {
  return absl::StrCat("CPU, ", team_->threads(), team_->threads() == 1 ? " thread" : " threads");
}

absl::StatusOr<std::unique_ptr<StreamBackend>> CpuDevice::NewStream(std::string_view name,
                                                                    int tasks_max) {
  return CpuStream::Create(name, tasks_max, team_, pool_);
}

std::unique_ptr<StreamBackend> CpuDevice::CallerStream() {
  return std::make_unique<CpuCallerStream>(team_);
}

absl::StatusOr<std::unique_ptr<EventBackend>> CpuDevice::NewEvent() {
  return std::make_unique<CpuEvent>(pool_);
}

absl::StatusOr<Buffer> CpuDevice::Allocate(int64_t bytes, std::string_view what) {
  return AllocatePages(bytes, what);
}

}  // namespace ebb
