// Progress for the user. On a terminal it is one line, which is rewritten, and cleared
// before the log writes a line. Elsewhere it is a plain line from time to time.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "ebb/runtime/engine/engine.h"
#include "report/history.h"

namespace ebb::gpt {

class Progress {
 public:
  // `steps` in all. Writes to standard output. A process has at most one at a time.
  explicit Progress(int64_t steps);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();  // ends the rewritten line

  void Show(const History& history, uint64_t memory_bytes);
  // A separate line, which the rewritten line does not overwrite.
  void Say(const std::string& line);

 private:
  const int64_t steps_, every_;
  const bool terminal_;
  std::mutex mutex_;   // any rank's thread may log
  bool open_ = false;  // a rewritten line is shown
};

// One line: step, loss, time of a step, tokens per second, memory, in fp16 the loss scale, time
// left.
std::string ProgressLine(const History& history, int64_t steps, uint64_t memory_bytes);

// Text with everything but printable ASCII and line ends as \xNN: a terminal obeys other bytes.
std::string Printable(const std::string& text);

}  // namespace ebb::gpt
