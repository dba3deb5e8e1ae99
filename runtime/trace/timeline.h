// A timeline: the time, stream and rank of each operation, in a file that Perfetto
// (ui.perfetto.dev) opens, in the Chrome trace event format.
//
// Spans go into memory reserved at construction; when it is full, later spans are dropped and
// counted, so tracing allocates nothing in a step. Ranks of one host append to one file, whether
// threads or processes: each takes a lock on the file for the time of its write, and the file is
// one valid JSON array after every write.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ebb {

class Timeline {
 public:
  struct Options {
    int rank = 0;
    std::string name = "engine";  // the process name that Perfetto shows, with the rank
    int64_t spans_max = 1 << 16;
  };
  // One recorded interval. Nanoseconds of a steady clock that all ranks of a host share.
  struct Span {
    const char* operation = "";     // borrowed: string literals or names that outlive the timeline
    std::string_view subject = {};  // unit or bucket; borrowed, too
    int track = 0;
    int64_t begin_ns = 0, end_ns = 0;
    int64_t step = 0;        // counted from 1
    int64_t evaluation = 0;  // from 1; such a span belongs to no step
    int64_t bytes = 0;
  };

  explicit Timeline(Options options);
  ~Timeline();

  // A row of the picture: "compute", "gather", ... Call before the first span; returns its number.
  int AddTrack(std::string name);
  // Any thread.
  void Add(const Span& span);
  static int64_t NowNs();
  int64_t dropped() const;

  // Empties the file, or says why it cannot be written. Call it on one rank, before any other
  // appends.
  static absl::Status Create(const std::string& path);
  // Adds this rank's spans to the file. Call it once, at the end.
  absl::Status AppendTo(const std::string& path) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ebb
