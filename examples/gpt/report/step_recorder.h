// Puts the reports of steps into the history and into the file of losses: losses and times, and the
// traffic of one step.
#pragma once

#include <array>
#include <cstdint>

#include "ebb/runtime/engine/engine.h"
#include "report/history.h"
#include "report/losses_file.h"
#include "report/progress.h"

namespace ebb::gpt {

// Takes the reports of steps into the history, with the time that each step took, and shows them.
//
// The traffic is that of the first steady step. Two updates were applied around it: its own, and
// the one of the step before, which runs in it. Without such a step it is the last step's. The
// step's report says whether its update was applied, and may come a step later.
class StepRecorder {
 public:
  // `progress` and `losses` are null on all ranks but 0, which reports for all. Without --losses
  // `losses` is null, too. If a line cannot be written, a run that `saves` stops. A run that does
  // not save would lose its work, so it goes on, and the line is tried again.
  StepRecorder(const Engine& engine, History& history, Progress* progress, LossesFile* losses,
               int64_t evaluate_every, bool saves)
      : engine_(engine),
        history_(history),
        progress_(progress),
        losses_(losses),
        evaluate_every_(evaluate_every),
        saves_(saves) {}

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
  LossesFile* const losses_;
  const int64_t evaluate_every_;
  const bool saves_;
  double since_ = 0;
  bool warned_ = false, warned_of_losses_ = false;
  static constexpr int64_t kRemembered = 4;
  std::array<bool, kRemembered> applied_ = {};  // the last reports, by number
  // The step with traffic in the history that is not decided yet; -1: none.
  int64_t candidate_ = -1;
};

}  // namespace ebb::gpt
