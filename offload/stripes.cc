#include "ebb/offload/stripes.h"

#include <algorithm>

namespace ebb {

Stripes::Stripes(int files, int64_t bytes, int64_t block_bytes)
    : files_(files),
      bytes_(bytes),
      unit_bytes_(block_bytes * std::max<int64_t>((int64_t{1} << 20) / block_bytes, 1)) {}

Stripes Stripes::Joined(std::span<const int64_t> sizes) {
  Stripes joined(static_cast<int>(sizes.size()), 0, /*block_bytes=*/1);
  for (const int64_t bytes : sizes) joined.ends_.push_back(joined.bytes_ += bytes);
  return joined;
}

Stripes::Place Stripes::PlaceOf(int64_t offset) const {
  if (!ends_.empty()) {
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), offset);
    const int64_t begin = end == ends_.begin() ? 0 : *(end - 1);
    return {static_cast<int>(end - ends_.begin()), offset - begin, *end - offset};
  }
  if (files_ == 1) return {0, offset, bytes_ - offset};
  const int64_t unit = offset / unit_bytes_;
  const int64_t within = offset % unit_bytes_;
  return {static_cast<int>(unit % files_), unit / files_ * unit_bytes_ + within,
          unit_bytes_ - within};
}

int64_t Stripes::FileBytes(int file) const {
  if (!ends_.empty()) {
    const auto index = static_cast<size_t>(file);
    return ends_[index] - (index == 0 ? 0 : ends_[index - 1]);
  }
  const int64_t units = bytes_ / unit_bytes_;
  const int64_t whole = (units / files_ + (file < units % files_ ? 1 : 0)) * unit_bytes_;
  return whole + (file == units % files_ ? bytes_ % unit_bytes_ : 0);
}

}  // namespace ebb
