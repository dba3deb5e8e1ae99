// Replaces raw_uring.cc in a build without liburing.
#include "raw_disk.h"

namespace ebb::bench {

std::unique_ptr<RawDisk> RawUring(const RawDiskOptions&) {
  return nullptr;
}

}  // namespace ebb::bench
