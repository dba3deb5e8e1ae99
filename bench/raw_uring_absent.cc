// In place of raw_uring.cc where there is no liburing.
#include "raw_disk.h"

namespace ebb::bench {

std::unique_ptr<RawDisk> RawUring(const RawDiskOptions&) {
  return nullptr;
}

}  // namespace ebb::bench
