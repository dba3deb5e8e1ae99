#include "ebb/offload/second_places.h"

#include <algorithm>
#include <utility>

namespace ebb {

using sharding::Place;

int64_t SecondPlaces::BytesOf(const sharding::SwapFiles& files) {
  int64_t bytes = 0;
  for (const std::vector<sharding::SwapFiles::Array>& arrays : files.sub_groups) {
    for (const sharding::SwapFiles::Array& array : arrays)
      bytes = std::max(bytes, array.place.offset + sharding::SwapAligned(array.bytes));
  }
  return bytes;
}

SecondPlaces::SecondPlaces(const sharding::SwapFiles& files, ShardFile& first,
                           std::unique_ptr<ShardFile> second)
    : end_(BytesOf(files)), first_(&first), second_(std::move(second)) {
  for (const std::vector<sharding::SwapFiles::Array>& arrays : files.sub_groups) {
    for (const sharding::SwapFiles::Array& array : arrays)
      if (array.bytes > 0) begins_.push_back(array.place.offset);
  }
  std::sort(begins_.begin(), begins_.end());
  moved_ = std::vector<std::atomic<uint64_t>>(begins_.size());
}

int SecondPlaces::Find(const Place& place) const {
  if (place.pool != StateClass::kMaster && place.pool != StateClass::kOptimizer) return -1;
  if (place.offset >= end_) return -1;
  const auto next = std::upper_bound(begins_.begin(), begins_.end(), place.offset);
  return static_cast<int>(next - begins_.begin()) - 1;
}

ShardFile& SecondPlaces::Current(const Place& place) const {
  const int array = Find(place);
  return FileOf(array >= 0 && (moved_[array].load(std::memory_order_acquire) & kInSecond));
}

ShardFile& SecondPlaces::Saved(const Place& place) const {
  const int array = Find(place);
  if (array < 0) return *first_;
  const uint64_t moved = moved_[array].load(std::memory_order_acquire);
  const bool in_second = (moved & kInSecond) != 0,
             has_moved = static_cast<uint32_t>(moved) == save_;
  return FileOf(in_second != has_moved);
}

bool SecondPlaces::MoveTo(const Place& place, uint32_t save) {
  const int array = Find(place);
  if (array < 0) return false;
  const uint64_t moved = moved_[array].load(std::memory_order_relaxed);
  if (static_cast<uint32_t>(moved) == save) return false;
  moved_[array].store(((moved & kInSecond) ^ kInSecond) | save, std::memory_order_release);
  return true;
}

}  // namespace ebb
