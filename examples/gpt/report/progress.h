// A run's steps, as they are recorded and shown.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ebb/runtime/engine/engine.h"

namespace ebb::gpt {

class LossesFile;
struct Run;

struct StepRecord {
  StepReport report;
  // From the report of the step before; or from this step's begin, if that report was known by
  // then. So each second counts once, although steps overlap.
  double seconds = 0;
};

struct Evaluated {
  int64_t step = 0;  // finished steps before it
  double loss = 0;
};

// The signal that ended a run before its last step, evaluation or sample.
struct Stopped {
  std::string by;      // "SIGINT"
  std::string during;  // "training", "evaluation" or "sample"
  int64_t steps = 0;   // finished steps before
  std::string after;   // "step 20 of 400", or of the sample "5 of 300 bytes"
};

struct History {
  int64_t tokens_per_step = 0;  // of all ranks
  bool scales_loss = false;     // true for fp16
  bool keeps_steps = true;      // false: single steps are not written

  void Add(const StepRecord& record);
  int64_t resumed = 0;   // steps that were finished when this run began
  int64_t finished = 0;  // steps, including resumed ones
  int64_t saved = 0;     // steps that the newest checkpoint has
  StepReport last = {};
  std::vector<StepRecord> steps = {};  // if they are kept
  std::vector<Evaluated> held_out = {};
  std::optional<Stopped> stopped = {};
  // This rank's traffic in a steady step: the update of the step before ran in it, and neither step
  // was skipped. If there was no steady step, that of the last step.
  std::vector<TrafficRow> traffic = {};
  bool traffic_is_steady = false;

  // For a run that adds this many steps to the resumed ones.
  void Begin(int64_t resumed_steps, int64_t to_do);
  // The steps of the warm-up, with cold caches and untouched pages: at most half of the steps that
  // this run adds.
  static constexpr int64_t kWarmUp = 2;
  static int64_t WarmUp(int64_t steps);
  int64_t warm_up = kWarmUp;                  // finished steps when the warm-up ends
  double cold_seconds = 0, warm_seconds = 0;  // of the warm-up's steps, and of those after
  // The mean over the steps after the warm-up; over all if there are no more. 0: no step was
  // finished.
  double SecondsOfStep() const;
  double TokensPerSecond() const;
};

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

// Progress for the user. On a terminal it is one line, which is rewritten, and cleared before the
// log writes a line. Elsewhere, and under Open MPI, it is a plain line from time to time, with the
// date and the time of day.
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

// Takes the reports of steps into the history, with the time that each step took, and shows them.
//
// The traffic is that of the first steady step. Two updates were applied around it: its own, and
// the one of the step before, which runs in it. Without such a step it is the last step's. The
// step's report says whether its update was applied, and may come a step later.
class StepRecorder {
 public:
  // `progress` is null on all ranks but 0, which reports for all. If a line of --losses cannot be
  // written, a run that saves stops. A run that does not save would lose its work, so it goes on,
  // and the line is tried again.
  StepRecorder(const Run& run, const Engine& engine, History& history, Progress* progress);

  // A step begins, and no report of the step before is awaited.
  void StartClock();
  void Take(const StepReport& report);
  // Before a save: a resumed run finds the lines of the steps that the checkpoint has, even if this
  // machine stops.
  void SyncLosses();
  // Call it after step number `step`, from 0, and before any evaluation.
  void TakeTraffic(int64_t step);
  // Decides whether the traffic is a steady step's, once reports have come.
  void DecideTraffic();

 private:
  void TakeWritten(const absl::Status& losses);

  const Engine& engine_;
  History& history_;
  Progress* const progress_;
  LossesFile* const losses_;  // null on other ranks, and without --losses
  const int64_t evaluate_every_;
  const bool saves_;
  double since_ = 0;
  bool warned_ = false, warned_of_losses_ = false;
  static constexpr int64_t kRemembered = 4;
  std::array<bool, kRemembered> applied_ = {};  // the last reports, by number
  // The step with traffic in the history that is not decided yet; -1: none.
  int64_t candidate_ = -1;
};

// The lines of a curve's title.
struct CurveTitle {
  std::string model, data;
};

// The loss over the steps, its moving average, and the held-out losses, with the last value of
// each. Losses that are not numbers are left out.
std::string CurveSvg(const History& history, const CurveTitle& title);

}  // namespace ebb::gpt
