// Faults of files, and values in place of measured ones, that a test program gives.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "ebb/offload/shard_file.h"

namespace ebb {

struct OffloadOverrides {
  // Becomes Options::wrap_queue of an engine's shard file. `owner`: "engine-rank0".
  std::function<decltype(ShardFile::Options::wrap_queue)(std::string_view owner,
                                                         std::string_view file)>
      wrap_queue = {};
  // The errno with which reserving space for a file fails; 0: space is reserved.
  std::function<int(std::string_view path)> reserve = {};
  // Called with each new file and its descriptor.
  std::function<void(std::string_view path, int descriptor)> made = {};
  // The result of measuring the disk's rate, in bytes a second; called by the rank that measures.
  std::function<double()> disk_rate = {};
  // A folder with /proc and /sys that describe the host's memory; "": the system's.
  std::string system_root = {};
};

// Without any. A test program that gives some defines this function itself
// (tests/offload/test_overrides.cc).
const OffloadOverrides& GivenOverrides();

}  // namespace ebb
