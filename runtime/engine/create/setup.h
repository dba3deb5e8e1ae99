// Makes an engine: checks the trainer's arguments, plans, agrees with the other ranks, measures
// values that the config leaves open, takes memory, and fills it. Collective; an error of one rank
// is an error of all.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/engine_parts.h"
#include "ebb/sharding/plan_facts.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<EngineParts>> MakeEngine(World world, Device device, ModelSpec model,
                                                        const Config& config,
                                                        EngineOptions options);

class Setup {
 public:
  explicit Setup(EngineParts& parts) : with_(parts) {}

  absl::Status Make();

 private:
  absl::Status CheckGroups() const;
  absl::Status CheckOptimizer() const;
  absl::Status MakeMemory();
  void MakeOutcome();
  absl::Status MakeIssuer();
  void MakeScopes();
  void MakeCalls();
  bool OwnOptimizerEnqueues() const;
  int StreamsOfDevice() const;
  void LogMade() const;
  std::string WhatPartsDoApart() const;
  const sharding::Plan& plan() const { return with_.plans.plan(); }
  const sharding::Decisions& decisions() const { return plan().decisions; }
  // Which slice of every unit is this rank's.
  int Slice() const { return with_.inputs.rank() % decisions().shards; }
  KernelsByStream Kernels() const { return {with_.kernels.device.get(), with_.kernels.host.get()}; }
  HostLane Control() const { return with_.communicators.Control(with_.streams.reduce()); }

  EngineParts& with_;
};

}  // namespace ebb
