// Progress for the user. On a terminal it is one line, which is rewritten, and cleared before the
// log writes a line. Elsewhere, and under Open MPI, it is a plain line from time to time, with the
// date and the time of day.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "ebb/runtime/engine/engine.h"
#include "report/history.h"

namespace ebb::gpt {

double Now();  // seconds of a steady clock

// Which steps have a plain line: the first, the last, about 20 between them, and one each minute.
class PlainLines {
 public:
  explicit PlainLines(int64_t steps);

  // Nothing: no line is due after `done` steps, at `now` in seconds of a steady clock. Otherwise
  // the steps a second since the last line; 0 for the first line.
  std::optional<double> Due(int64_t done, double now);

 private:
  const int64_t steps_, every_;
  int64_t last_done_ = -1;
  double last_time_ = 0;
};

class Progress {
 public:
  // `steps` in all. Writes to standard output. A process has at most one at a time.
  explicit Progress(int64_t steps);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();  // ends the rewritten line

  void Show(const History& history, uint64_t memory_bytes);
  // Before another writer prints where the rewritten line may be.
  void Clear();
  // A separate line, which the rewritten line does not overwrite.
  void Say(const std::string& line);

 private:
  const int64_t steps_;
  const bool terminal_;
  PlainLines plain_lines_;
  std::mutex mutex_;   // any rank's thread may log
  bool open_ = false;  // a rewritten line is shown
};

// One line: step, loss, time of a step, tokens per second, memory, in fp16 the loss scale, time
// left.
std::string ProgressLine(const History& history, int64_t steps, uint64_t memory_bytes);

// Text with everything but printable ASCII and line ends as \xNN: a terminal obeys other bytes.
std::string Printable(const std::string& text);

}  // namespace ebb::gpt
