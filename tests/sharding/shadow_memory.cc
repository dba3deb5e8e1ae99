#include "shadow_memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ebb::sharding {

std::string ToString(const Content& content) {
  constexpr const char* kNames[] = {
      "nothing",        "parameter",          "frozen",        "master",          "state",
      "whole gradient", "cast gradient",      "group's slice", "summed slice",    "reduced slice",
      "gradient shard", "whole shard",        "output",        "output gradient", "norm",
      "exchanged",      "fp32 gradient slice"};
  return absl::StrCat(kNames[content.kind], "(", content.a, ", ", content.b, ", ", content.c, ")");
}

ShadowMemory::ShadowMemory(const HappensBefore& order, const int64_t (&pool_bytes)[kStateClasses])
    : order_(order) {
  for (int pool = 0; pool < kStateClasses; ++pool) {
    bytes_[pool] = pool_bytes[pool];
    Segment whole{.end = bytes_[pool], .content = {}, .readers = {}};
    whole.readers.fill(HappensBefore::kStart);
    if (bytes_[pool] > 0) pools_[pool].emplace(0, whole);
  }
}

void ShadowMemory::Read(int thing, const Range& range, const Content& expected) {
  if (!Check(thing, range)) return;
  const auto [first, past] = Cut(range);
  for (auto it = first; it != past; ++it) {
    Segment& segment = it->second;
    if (segment.content != expected) {
      Complain(thing, range,
               absl::StrCat("finds ", ToString(segment.content), " at ", it->first, " instead of ",
                            ToString(expected)));
    } else if (!order_.Before(segment.writer, thing)) {
      Complain(thing, range,
               absl::StrCat("may start before ", ToString(expected), " is there, which ",
                            segment.writer, " writes"));
    }
    if (thing != HappensBefore::kStart)
      segment.readers[static_cast<int>(order_.stream(thing))] = thing;
  }
}

void ShadowMemory::Write(int thing, const Range& range, const Content& content) {
  if (!Check(thing, range)) return;
  const auto [first, past] = Cut(range);
  for (auto it = first; it != past; ++it) {
    const Segment& segment = it->second;
    const auto over = [&](int other) { return other == thing || order_.Before(other, thing); };
    if (!over(segment.writer)) {
      Complain(thing, range,
               absl::StrCat("may write before ", segment.writer, " has written ",
                            ToString(segment.content)));
    }
    for (int reader : segment.readers) {
      if (over(reader)) continue;
      Complain(thing, range,
               absl::StrCat("may overwrite ", ToString(segment.content), " before ", reader,
                            " has read it"));
    }
  }
  Segments& segments = pools_[static_cast<int>(range.pool)];
  segments.erase(first, past);
  Segment written{
      .end = range.begin + range.bytes, .content = content, .writer = thing, .readers = {}};
  written.readers.fill(HappensBefore::kStart);
  segments.emplace(range.begin, written);
}

std::pair<ShadowMemory::Segments::iterator, ShadowMemory::Segments::iterator> ShadowMemory::Cut(
    const Range& range) {
  Segments& segments = pools_[static_cast<int>(range.pool)];
  const auto cut_at = [&](int64_t at) {
    const auto it = std::prev(segments.upper_bound(at));
    if (it->first == at || it->second.end <= at) return;
    Segment upper = it->second;
    it->second.end = at;
    segments.emplace(at, upper);
  };
  cut_at(range.begin);
  cut_at(range.begin + range.bytes);
  return {segments.lower_bound(range.begin), segments.lower_bound(range.begin + range.bytes)};
}

// Whether there is something to access.
bool ShadowMemory::Check(int thing, const Range& range) {
  if (range.bytes == 0 || !complaint_.empty()) return false;
  const int64_t pool_bytes = bytes_[static_cast<int>(range.pool)];
  if (range.begin >= 0 && range.begin + range.bytes <= pool_bytes) return true;
  Complain(thing, range, absl::StrCat("is outside of the pool of ", pool_bytes, " bytes"));
  return false;
}

void ShadowMemory::Complain(int thing, const Range& range, const std::string& what) {
  if (!complaint_.empty()) return;
  const std::string_view pool = Name(range.pool);
  thing_ = thing;
  complaint_ = absl::StrCat(std::string(pool), " [", range.begin, ", ", range.begin + range.bytes,
                            "): ", thing, " ", what);
}

}  // namespace ebb::sharding
