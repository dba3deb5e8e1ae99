// This machine in figures, measured in a few seconds: RAM by copies, sums and updates, the disk by
// a file in a folder, arithmetic by oneDNN's products. The driver gives the number of GPUs and
// their free memory; the first GPU's memory and link are measured by copies, its arithmetic by
// cuBLASLt's products.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/planner/machine.h"

namespace ebb::planner {

// `folder`: a folder on the disk; "": no disk is measured.
absl::StatusOr<Machine> MeasureHere(const std::string& folder);

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
