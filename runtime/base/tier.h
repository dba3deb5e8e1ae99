// The place of a class of state: the device that computes, the host's RAM, or its disks.
#pragma once

#include <cstdint>
#include <string_view>

namespace ebb {

enum class Tier : uint8_t { kDevice, kCpu, kNvme };
inline constexpr int kTiers = 3;

// The spelling in every report: "device", "cpu", "nvme".
constexpr std::string_view Name(Tier tier) {
  constexpr std::string_view kNames[kTiers] = {"device", "cpu", "nvme"};
  return kNames[static_cast<int>(tier)];
}

}  // namespace ebb
