// Reads a timeline as strictly as Perfetto's importer, and more strictly where that only drops
// events: for tests of all code that writes one.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace ebb {

struct TraceSpan {
  std::string name, category;
  int64_t begin_ns = 0, end_ns = 0;
  int64_t step = 0, evaluation = 0;  // one is set, the other is 0
  int64_t bytes = 0;
};

struct TraceTrack {
  std::string process, name;
  std::vector<TraceSpan> spans;  // in the file's order
};

// By pid (the rank) and tid (the track).
using TraceTracks = std::map<std::pair<int64_t, int64_t>, TraceTrack>;

// An error names problems that Perfetto would not show: text that is not one JSON array of objects;
// events without the fields that their phase needs; spans on a track or of a process without a
// name; spans of one track that overlap without nesting.
absl::StatusOr<TraceTracks> ReadTraceEvents(const std::string& path);

}  // namespace ebb
