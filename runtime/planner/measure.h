// Measurements on the spot: wall times of work, and rates of matrix products as trainers have
// them.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"

namespace ebb::planner {

inline double Seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The median of a few runs, as a trainer's steps are. The first run fills caches and page tables.
inline double MedianSeconds(const std::function<void()>& work) {
  work();
  std::array<double, 5> seconds;
  for (double& of : seconds) of = Seconds(work);
  std::nth_element(seconds.begin(), seconds.begin() + 2, seconds.end());
  return seconds[2];
}

// Operations a second of oneDNN's products, in so many threads that multiply at once: bf16 where the
// CPU multiplies it at full speed, else fp32, to which trainers then convert bf16.
absl::StatusOr<double> ProductRateOfCores(int threads);

// Operations a second of a large bf16 product by cuBLASLt. kUnavailable: there is no cuBLASLt.
// kUnimplemented: it has no such product for this GPU.
absl::StatusOr<double> ProductRateOfGpu(const Device& device);

}  // namespace ebb::planner
