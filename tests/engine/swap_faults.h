// Engines with parameters and states on a disk, and what stands between the two.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/faulty_queue.h"
#include "tests/offload/test_overrides.h"

namespace ebb::testing::swap_faults {

inline constexpr int kWorld = 2, kSteps = 6;

// Shards of two or three sub-groups.
inline ToyModel SomeModel() {
  return ToyModel({.width = 67});
}

inline Config OnNvme(const std::string& path, Timing timing) {
  Config config = testing::OnNvme(ConfigFor({.world = kWorld, .stage = 3, .timing = timing}), path);
  config.compute = DType::kBFloat16;
  config.ebb.timeout_seconds = 20;
  config.zero.sub_group_size = 2048;
  config.aio.block_size = 4096;
  return config;
}

// `config` with all on the device that it has on NVMe.
inline Config OnDevice(Config config) {
  config.zero.offload_param = {};
  config.zero.offload_optimizer = {};
  return config;
}

inline int EntriesUnder(const std::string& path) {
  int entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::recursive_directory_iterator(path))
    ++entries;
  return entries;
}

// Sets what stands between engines and their disks, for as long as it lives.
class Overrides {
 public:
  Overrides() = default;
  Overrides(const Overrides&) = delete;
  ~Overrides() { TestOverrides() = {}; }

  // `fault`: of the file, by "rank0/states" and the like.
  using Fault = std::function<std::optional<int64_t>(const std::string& whose, IoRequest& request)>;
  void Between(Fault fault, size_t hold = 1) {
    TestOverrides().wrap_queue = [fault, hold](std::string_view owner, std::string_view file) {
      const std::string whose = absl::StrCat(
          "rank", std::string(owner.substr(owner.find("-rank") + 5, 1)), "/", std::string(file));
      return WithFaults([fault, whose](IoRequest& request) { return fault(whose, request); }, hold);
    };
  }
  void Reserve(std::function<int(std::string_view)> error) {
    TestOverrides().reserve = std::move(error);
  }
};

// Bits of the masters after a few steps, or the first error.
inline absl::StatusOr<std::vector<uint32_t>> Trained(const Config& config) {
  return TrainedMasterBits(kWorld, SomeModel(), config, kSteps);
}

}  // namespace ebb::testing::swap_faults
