// Makes an engine: checks the trainer's arguments, plans, agrees with the other ranks, measures
// values that the config leaves open, takes memory, and fills it. Collective; an error of one rank
// is an error of all.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/create/engine_members.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<EngineMembers>> MakeEngine(World world, Device device,
                                                          ModelSpec model, const Config& config,
                                                          EngineOptions options);

class Measuring;

class Setup {
 public:
  explicit Setup(EngineMembers& engine) : with_(engine) {}

  absl::Status Make();

 private:
  absl::Status AgreeInPart(const absl::Status& own);
  absl::Status MeasureInPart(Measuring& measuring);
  absl::Status MakeInPart(Measuring& measuring);
  absl::Status AmongAllRanks(const absl::Status& of_part);
  absl::Status CheckGroups() const;
  absl::Status CheckOptimizer() const;
  absl::Status MakeMemory();
  int StreamsOfDevice() const;
  void LogMade() const;
  std::string WhatPartsDoApart() const;
  std::string WhoKeepsFp32States() const;
  const sharding::Plan& plan() const { return with_.plans.plan(); }
  const sharding::Decisions& decisions() const { return plan().decisions; }

  EngineMembers& with_;
};

}  // namespace ebb
