// The CPU behind the Device interface: memory straight from the system, streams as threads, one
// team of threads for all kernels.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/device/cpu/cpu_event.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

class CpuDevice : public DeviceBackend {
 public:
  explicit CpuDevice(int threads);

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string description() const override;
  absl::StatusOr<std::unique_ptr<StreamBackend>> NewStream(std::string_view name,
                                                           int tasks_max) override;
  std::unique_ptr<StreamBackend> CallerStream() override;
  absl::StatusOr<std::unique_ptr<EventBackend>> NewEvent() override;
  absl::StatusOr<Buffer> Allocate(int64_t bytes, std::string_view what) override;

 private:
  // Streams and events own these too, so they may outlive the device's last handle.
  std::shared_ptr<ThreadTeam> team_;
  std::shared_ptr<ProgressPool> pool_;
};

}  // namespace ebb
