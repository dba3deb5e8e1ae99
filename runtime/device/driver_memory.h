// Memory of a device that the driver and libraries take beside its buffers: the context, NCCL's
// communicators, handles, graphs, the code of kernels. None of them reports its size, so the drop
// of the device's free memory is measured. The drop includes what other processes take or free on
// the device meanwhile, so the number is for messages only.
//
//   {
//     const DriverMemory::Measured measured(device);   // nested and concurrent ones count once
//     cublasLtCreate(&handle);                         // no buffer of the device is made in here
//   }
//   device.driver_bytes();                             // adds the bytes that the handle took
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "ebb/runtime/device/device.h"

namespace ebb {

class DriverMemory {
 public:
  class Measured {
   public:
    explicit Measured(const Device& device);
    ~Measured();
    Measured(const Measured&) = delete;
    Measured& operator=(const Measured&) = delete;

   private:
    const Device device_;
  };

  // `bytes` that were taken before the first measurement.
  void Add(int64_t bytes);
  int64_t bytes() const;
  int64_t peak_bytes() const;

 private:
  void Begin(const Device& device);
  void End(const Device& device);

  mutable std::mutex mutex_;
  int open_ = 0;                        // Measured objects that exist
  std::optional<int64_t> free_before_;  // when the first of them began; unknown: not measured
  int64_t bytes_ = 0, peak_bytes_ = 0;
};

}  // namespace ebb
