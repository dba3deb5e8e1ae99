// Where tests of what stands on shard files and host memory put their faults. Nothing else sets these.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "ebb/offload/shard_file.h"

namespace ebb {

struct OffloadTestHooks {
  // What an engine's shard file gets as Options::wrap_queue; `directory`: the first of its own.
  std::function<decltype(ShardFile::Options::wrap_queue)(std::string_view directory,
                                                         std::string_view file)>
      wrap_queue = {};
  // The errno with which reserving space for a file fails; 0: it is tried.
  std::function<int(std::string_view path)> reserve = {};
  // On the thread that waits for the disk to learn whether a file is still this run's.
  std::function<void(std::string_view path)> check = {};
  // What measuring how fast the disk moves data comes to, in bytes a second; 0: what it is.
  double disk_rate = 0;
  // A folder whose /proc and /sys say what memory the host has; "": the system's.
  std::string system_root = {};
};

// Of the process. Not to be changed while engines or shard files are being created.
OffloadTestHooks& GetOffloadTestHooks();

}  // namespace ebb
