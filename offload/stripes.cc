#include "ebb/offload/stripes.h"

#include <algorithm>

namespace ebb {

Stripes::Stripes(int files, int64_t bytes, int64_t block_bytes)
    : files_(files),
      bytes_(bytes),
      unit_bytes_(block_bytes * std::max<int64_t>((int64_t{1} << 20) / block_bytes, 1)) {}

Stripes::Place Stripes::PlaceOf(int64_t offset) const {
  if (files_ == 1) return {0, offset, bytes_ - offset};
  const int64_t unit = offset / unit_bytes_;
  const int64_t within = offset % unit_bytes_;
  return {static_cast<int>(unit % files_), unit / files_ * unit_bytes_ + within,
          unit_bytes_ - within};
}

int64_t Stripes::FileBytes(int file) const {
  const int64_t units = bytes_ / unit_bytes_;
  const int64_t whole = (units / files_ + (file < units % files_ ? 1 : 0)) * unit_bytes_;
  return whole + (file == units % files_ ? bytes_ % unit_bytes_ : 0);
}

}  // namespace ebb
