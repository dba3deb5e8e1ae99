// Lets NCCL connect ranks that share a device (World::On), as long as it lives.
#pragma once

#include <cstdlib>

namespace ebb::testing {

// Whether sums over NCCL have one order in every collective, as those of the stand-in
// (stand_in/last_device.cc).
inline bool nccl_sums_in_one_order = false;

class NcclSharesDevice {
 public:
  explicit NcclSharesDevice(bool shares = true) { setenv(kName, shares ? "1" : "0", 1); }
  ~NcclSharesDevice() { unsetenv(kName); }
  NcclSharesDevice(const NcclSharesDevice&) = delete;
  NcclSharesDevice& operator=(const NcclSharesDevice&) = delete;

 private:
  static constexpr char kName[] = "NCCL_MULTI_RANK_GPU_ENABLE";
};

}  // namespace ebb::testing
