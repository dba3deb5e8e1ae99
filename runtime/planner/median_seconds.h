// Wall time of work that is measured on the spot.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>

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

}  // namespace ebb::planner
