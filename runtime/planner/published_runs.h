// Published runs of other programs, and the simulated step of each: how far step times can be
// trusted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ebb/runtime/planner/model_shape.h"

namespace ebb::planner {

struct PublishedStep {
  const char* name;
  const char* machine;
  double network_gb_s;  // of a host; 0: the machine's
  ModelShape shape;
  int ranks, stage;
  int64_t batch, context;
  bool recompute;
  double tokens_per_second;  // of one GPU, as published
  // The share of forward that backward computes again, beside `recompute`.
  double selected = 0;
};

// A run, and another of the same program with the same recomputing, which gives the share of a
// GPU's peak that the program reaches, as --efficiency would; none: the program published no other.
struct PublishedRun {
  PublishedStep step;
  std::optional<PublishedStep> rate = {};
};
// None of the fourteen sets a rate of a machine (named_machines.cc) or of a program.
// bench/results/2026-11-25-plan.md lists sources and earlier results.
std::vector<PublishedRun> PublishedRuns();

// The simulated speed over the published one, with the rate of the run's program (else the
// machine's), and with the named machine's rate.
struct PredictedRatio {
  double of_program = 0, of_machine = 0;
};
PredictedRatio RatioOf(const PublishedRun& run);

// The table of all runs, with the errors of both, and how many of them are within 15%.
std::string PublishedRunsText();
std::string PublishedRunsAsJson();

}  // namespace ebb::planner
