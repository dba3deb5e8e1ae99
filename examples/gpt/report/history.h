// The reports of all steps, and the curve that is drawn of them, as SVG.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ebb/runtime/engine/engine.h"

namespace ebb::gpt {

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

// The lines of a curve's title.
struct CurveTitle {
  std::string model, data;
};

// The loss over the steps, its moving average, and the held-out losses, with the last value of
// each. Losses that are not numbers are left out.
std::string CurveSvg(const History& history, const CurveTitle& title);

}  // namespace ebb::gpt
