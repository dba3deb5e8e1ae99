#include "shadow_memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ebb::sharding {

std::string ToString(const Content& content) {
  constexpr const char* kNames[] = {"nothing",
                                    "parameter",
                                    "frozen",
                                    "master",
                                    "state",
                                    "whole gradient",
                                    "cast gradient",
                                    "group's slice",
                                    "summed slice",
                                    "reduced slice",
                                    "gradient shard",
                                    "whole shard",
                                    "output",
                                    "output gradient",
                                    "norm",
                                    "sums",
                                    "exchanged",
                                    "fp32 slice",
                                    "norms",
                                    "norm records",
                                    "direction",
                                    "matrices",
                                    "orthogonal direction"};
  return absl::StrCat(kNames[content.kind], "(", content.a, ", ", content.b, ", ", content.c, ")",
                      content.first > 0 ? absl::StrCat(" from byte ", content.first) : "");
}

ShadowMemory::ShadowMemory(const HappensBefore& order, const Table& table) : order_(order) {
  const auto make = [&](Tier tier, StateClass state, int64_t bytes) {
    Pool& pool = pools_[static_cast<size_t>(tier)][static_cast<size_t>(state)];
    pool.bytes = bytes;
    Segment whole{.end = bytes, .content = {}, .readers = {}};
    whole.readers.fill(HappensBefore::kStart);
    if (bytes > 0) pool.segments.emplace(0, whole);
  };
  for (int c = 0; c < kStateClasses; ++c) {
    const StateClass state = static_cast<StateClass>(c);
    for (const Tier tier : {Tier::kDevice, Tier::kCpu})
      make(tier, state, table.bytes.Of(tier, state));
  }
  make(Tier::kNvme, StateClass::kParameter, table.bytes.Of(Tier::kNvme, StateClass::kParameter));
  make(Tier::kNvme, StateClass::kMaster, table.bytes.state_file());
  make(Tier::kCpu, kControlBytes, ControlCells(table.units).count());
}

void ShadowMemory::NoteRead(int thing, const Range& range, Segment& segment) {
  if (!order_.Before(segment.writer, thing)) {
    Complain(thing, range,
             absl::StrCat("may start before ", ToString(segment.content), " is there, which ",
                          segment.writer, " writes"));
  }
  if (thing != HappensBefore::kStart)
    segment.readers[static_cast<size_t>(order_.line(thing))] = thing;
}

void ShadowMemory::Read(int thing, const Range& range, const Content& expected) {
  if (!Check(thing, range)) return;
  const auto [first, past] = Cut(range);
  for (auto it = first; it != past; ++it) {
    Content here = expected;
    here.first += it->first - range.begin;
    if (it->second.content != here) {
      Complain(thing, range,
               absl::StrCat("finds ", ToString(it->second.content), " at ", it->first,
                            " instead of ", ToString(here)));
    }
    NoteRead(thing, range, it->second);
  }
}

void ShadowMemory::CheckOverwrite(int thing, const Range& range, const Segment& segment) {
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

void ShadowMemory::Write(int thing, const Range& range, const Content& content) {
  if (!Check(thing, range)) return;
  const auto [first, past] = Cut(range);
  for (auto it = first; it != past; ++it) CheckOverwrite(thing, range, it->second);
  Segments& segments = PoolOf(range).segments;
  segments.erase(first, past);
  Segment written{
      .end = range.begin + range.bytes, .content = content, .writer = thing, .readers = {}};
  written.readers.fill(HappensBefore::kStart);
  segments.emplace(range.begin, written);
}

void ShadowMemory::Copy(int thing, const Range& from, const Range& to) {
  if (!Check(thing, from) || !Check(thing, to)) return;
  const int64_t shift = to.begin - from.begin;
  std::vector<std::pair<int64_t, Segment>> copied;
  const auto [first, past] = Cut(from);
  for (auto it = first; it != past; ++it) {
    NoteRead(thing, from, it->second);
    Segment copy{.end = it->second.end + shift,
                 .content = it->second.content,
                 .writer = thing,
                 .readers = {}};
    copy.readers.fill(HappensBefore::kStart);
    copied.emplace_back(it->first + shift, copy);
  }
  const auto [to_first, to_past] = Cut(to);
  for (auto it = to_first; it != to_past; ++it) CheckOverwrite(thing, to, it->second);
  Segments& segments = PoolOf(to).segments;
  segments.erase(to_first, to_past);
  segments.insert(copied.begin(), copied.end());
}

std::pair<ShadowMemory::Segments::iterator, ShadowMemory::Segments::iterator> ShadowMemory::Cut(
    const Range& range) {
  Segments& segments = PoolOf(range).segments;
  const auto cut_at = [&](int64_t at) {
    const auto it = std::prev(segments.upper_bound(at));
    if (it->first == at || it->second.end <= at) return;
    Segment upper = it->second;
    if (upper.content.kind != Content::kNothing) upper.content.first += at - it->first;
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
  const int64_t pool_bytes = PoolOf(range).bytes;
  if (range.begin >= 0 && range.begin + range.bytes <= pool_bytes) return true;
  Complain(thing, range, absl::StrCat("is outside of the pool of ", pool_bytes, " bytes"));
  return false;
}

void ShadowMemory::Complain(int thing, const Range& range, const std::string& what) {
  if (!complaint_.empty()) return;
  const std::string_view pool = Name(range.pool), tier = Name(range.tier);
  thing_ = thing;
  complaint_ = absl::StrCat(std::string(tier), " ", std::string(pool), " [", range.begin, ", ",
                            range.begin + range.bytes, "): ", thing, " ", what);
}

}  // namespace ebb::sharding
