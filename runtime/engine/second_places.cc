#include "ebb/runtime/engine/second_places.h"

#include <algorithm>
#include <utility>

namespace ebb {

using sharding::Place;

int64_t SecondPlaces::BytesOf(const sharding::SwapFiles& files) {
  int64_t bytes = 0;
  for (const std::vector<sharding::SwapFiles::Array>& arrays : files.sub_groups) {
    for (const sharding::SwapFiles::Array& array : arrays)
      bytes = std::max(bytes, array.home.offset + sharding::SwapAligned(array.bytes));
  }
  return bytes;
}

SecondPlaces::SecondPlaces(const sharding::SwapFiles& files, ShardFile& first,
                           std::unique_ptr<ShardFile> second)
    : end_(BytesOf(files)), first_(&first), second_(std::move(second)) {
  for (const std::vector<sharding::SwapFiles::Array>& arrays : files.sub_groups) {
    for (const sharding::SwapFiles::Array& array : arrays)
      if (array.bytes > 0) arrays_.emplace_back(array.home.offset);
  }
  std::sort(arrays_.begin(), arrays_.end(),
            [](const Array& a, const Array& b) { return a.begin < b.begin; });
}

const SecondPlaces::Array* SecondPlaces::Find(const Place& place) const {
  if (place.pool != StateClass::kMaster && place.pool != StateClass::kOptimizer) return nullptr;
  if (place.offset >= end_) return nullptr;
  const auto next =
      std::upper_bound(arrays_.begin(), arrays_.end(), place.offset,
                       [](int64_t offset, const Array& array) { return offset < array.begin; });
  return next == arrays_.begin() ? nullptr : &*std::prev(next);
}

ShardFile& SecondPlaces::Current(const Place& place) const {
  const Array* array = Find(place);
  return FileOf(array != nullptr && (array->moved.load(std::memory_order_acquire) & kInSecond));
}

ShardFile& SecondPlaces::Saved(const Place& place) const {
  const Array* array = Find(place);
  if (array == nullptr) return *first_;
  const uint64_t moved = array->moved.load(std::memory_order_acquire);
  const bool in_second = (moved & kInSecond) != 0,
             has_moved = static_cast<uint32_t>(moved) == save_;
  return FileOf(in_second != has_moved);
}

bool SecondPlaces::MoveTo(const Place& place, uint32_t save) {
  auto* const array = const_cast<Array*>(Find(place));
  if (array == nullptr) return false;
  const uint64_t moved = array->moved.load(std::memory_order_relaxed);
  if (static_cast<uint32_t>(moved) == save) return false;
  array->moved.store(((moved & kInSecond) ^ kInSecond) | save, std::memory_order_release);
  return true;
}

}  // namespace ebb
