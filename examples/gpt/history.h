// What every step reported, and the two pictures of it: a CSV file and a curve as SVG.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ebb/runtime/engine/engine.h"

namespace ebb::gpt {

struct StepRecord {
  StepReport report;
  // From the report of the step before, or where that was known before this one began, from its
  // begin: of steps that overlap each second counts once.
  double seconds = 0;
};

struct Evaluated {
  int64_t step = 0;  // steps finished before
  double loss = 0;
};

// What ended a run before its last step, evaluation or sample.
struct Stopped {
  std::string by;      // "SIGINT"
  std::string during;  // "training", "evaluation" or "sample"
  int64_t steps = 0;   // finished before
};

struct History {
  int64_t tokens_per_step = 0;  // of all ranks
  bool scales_loss = false;     // in fp16
  bool keeps_steps = true;      // false: nothing is to be written of single steps

  void Add(const StepRecord& record);
  int64_t resumed = 0;   // steps that were finished before this run began
  int64_t finished = 0;  // steps, with those
  int64_t saved = 0;     // of these the newest checkpoint has so many
  StepReport last = {};
  std::vector<StepRecord> steps = {};  // where they are kept
  std::vector<Evaluated> held_out = {};
  std::optional<Stopped> stopped = {};
  // Of this rank, in a step in steady state: one that ran the updates of the step before, where
  // neither was skipped. Where there was none, of the last.
  std::vector<TrafficRow> traffic = {};
  bool traffic_is_steady = false;

  // Of a run that is to do so many steps beside those that were resumed.
  void Begin(int64_t resumed_steps, int64_t to_do);
  // The first steps still meet cold caches and untouched pages: so many, and no more than half of
  // those to come.
  static constexpr int64_t kWarmUp = 2;
  static int64_t WarmUp(int64_t steps);
  int64_t warm_up = kWarmUp;                  // where that ends: finished steps
  double cold_seconds = 0, warm_seconds = 0;  // of the first warm_up steps, and of those after
  // Over the steps after the first warm_up; over all if there are no more. 0: none was finished.
  double SecondsOfStep() const;
  double TokensPerSecond() const;
};

// What a curve is of, a line each.
struct CurveTitle {
  std::string model, data;
};

// A header and a line for each step.
std::string LossesCsv(const History& history);

// The loss over the steps, its moving average, and the held-out losses, with what the last ones are;
// losses that are not numbers are left out.
std::string CurveSvg(const History& history, const CurveTitle& title);

}  // namespace ebb::gpt
