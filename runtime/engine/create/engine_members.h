// Everything that an engine owns.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/swap_verifier.h"
#include "ebb/runtime/engine/create/interpreter.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/issue/issue_observer.h"
#include "ebb/runtime/engine/issue/profiler_ranges.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/issue/step_timeline.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/kernels_by_stream.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/outcome_messages.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/program.h"
#include "ebb/runtime/engine/ranks/collective_pools.h"
#include "ebb/runtime/engine/ranks/engine_calls.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/runtime/engine/ranks/step_communicators.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/runtime/engine/updates/norm_exchange.h"
#include "ebb/runtime/engine/updates/own_optimizer.h"
#include "ebb/runtime/engine/updates/update_table.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/fit/budget.h"

namespace ebb {

class FolderLock;

// Memory that state passes through on its way to files or back.
struct FileBuffer {
  absl::StatusOr<std::span<std::byte>> Of(int64_t bytes, MemoryLedger& ledger);

  PinnedMemory memory;
  MemoryLedger::Charge charge;
  int64_t predicted = 0;  // bytes: the most that a call has asked for
};

struct EngineMembers {
  explicit EngineMembers(EngineInputs made_of);
  ~EngineMembers();
  EngineMembers(const EngineMembers&) = delete;
  EngineMembers& operator=(const EngineMembers&) = delete;

  // Makes what follows from a plan: cells of memory, lists with the order of their streams.
  // Once all that they work on is there; again for another plan, while nothing is under way, before
  // Interpreter::FollowPlan. All stay at their addresses.
  absl::Status LinkPlan();
  // Which slice of every unit is this rank's.
  int Slice() const { return inputs.rank() % plans.plan().decisions.shards; }
  HostLane Control() { return communicators.Control(streams.reduce()); }
  // The lane of all ranks that train the model, before the first step.
  HostLane AllRanks() {
    return inputs.verdict.has_value() ? communicators.Verdict(streams.reduce()) : Control();
  }

  EngineInputs inputs;
  std::optional<sharding::HostRoom> host_room;  // before Create took the pools
  std::string run;
  std::vector<std::shared_ptr<FolderLock>> folder_locks;
  std::vector<std::string> damaged_checkpoints;
  EngineCalls calls;
  MemoryLedger ledger;
  FileBuffer file_buffer;
  StepTimeline timeline;
  EngineCommunicators communicators;
  CollectivePools collective_pools;
  RunnablePlans plans;
  std::optional<Program> program;  // what of it is public
  KernelsByStream kernels;
  std::optional<Storage> storage;
  std::optional<ControlBlock> control;
  StepErrors errors;
  VerdictRanks verdict_ranks;
  OutcomeMessages messages;
  StepCommunicators peers;
  std::optional<SwapVerifier> verifier;
  // Values of the config and the model that updates need.
  UpdateTable update_table;
  OptimizerStateNames state_names;
  std::optional<OwnOptimizer> own_optimizer;  // of the trainer's
  std::optional<NormExchange> norms;          // where an optimizer takes norms
  std::vector<int> last_backwards;            // by unit: a scope, in the order of steps
  std::optional<ProfilerRanges> ranges;
  std::unique_ptr<IssueObserver> observer;  // of a check of the order; null: none
  IssueObservers observers;                 // the observers above, and the timeline's
  std::optional<StreamOrder> order;
  std::optional<Interpreter> interpreter;
  // Declared last, so that they end first, because their tasks use the members above.
  EngineStreams streams;
};

// The error of every call of an Engine that was moved from, or of its EngineState.
absl::Status MovedFrom();

}  // namespace ebb
