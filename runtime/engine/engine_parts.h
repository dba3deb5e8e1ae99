// Everything that an engine owns. Parts borrow from each other what setup.cc hands them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/swap_verifier.h"
#include "ebb/optim/kernels.h"
#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/issue/issue_observer.h"
#include "ebb/runtime/engine/issue/profiler_ranges.h"
#include "ebb/runtime/engine/issue/record_exchange.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/issue/step_timeline.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/outcome_parts.h"
#include "ebb/runtime/engine/program.h"
#include "ebb/runtime/engine/ranks/call_barrier.h"
#include "ebb/runtime/engine/ranks/collective_pools.h"
#include "ebb/runtime/engine/ranks/engine_calls.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/runtime/engine/state/async_reads.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/runtime/engine/state/state_calls.h"
#include "ebb/runtime/engine/steps/fragment_runner.h"
#include "ebb/runtime/engine/steps/open_scopes.h"
#include "ebb/runtime/engine/steps/order_notices.h"
#include "ebb/runtime/engine/steps/paused_step.h"
#include "ebb/runtime/engine/steps/scope_views.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/runtime/engine/steps/steps.h"
#include "ebb/runtime/engine/steps/suspension.h"
#include "ebb/runtime/engine/steps/view_errors.h"
#include "ebb/runtime/engine/updates/norm_exchange.h"
#include "ebb/runtime/engine/updates/own_optimizer.h"
#include "ebb/runtime/engine/updates/update_call.h"
#include "ebb/runtime/engine/updates/update_table.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/fit/budget.h"

namespace ebb {

class FolderLock;
class Issuer;

// Streams of the device, and of the host.
struct KernelParts {
  std::unique_ptr<optim::Kernels> device, host;
};

// Updates, and the values of the config and the model that they need.
struct UpdateParts {
  UpdateTable table;
  OptimizerStateNames state_names;
  std::optional<OwnOptimizer> own;    // of the trainer's
  std::optional<NormExchange> norms;  // where an optimizer takes norms
  std::optional<UpdateCall> call;
};

// The parts that run plans.
struct IssueParts {
  std::optional<ProfilerRanges> ranges;
  std::unique_ptr<IssueObserver> observer;  // of a check of the order; null: none
  IssueObservers observers;                 // the observers above, and the timeline's
  std::optional<RecordExchange> exchange;
  std::optional<StreamOrder> order;
  std::unique_ptr<Issuer> issuer;
  std::optional<FragmentRunner> runner;
};

// The parts between a trainer's scopes and the plan.
struct ScopeParts {
  CallersCore core = {};  // of the thread that opens scopes
  ViewErrors view_errors;
  StepProgress progress = {};
  OrderNotices notices;
  std::optional<ScopeViews> views = {};
  std::optional<OpenScopes> open = {};
  std::optional<PausedStep> paused = {};
};

// Memory that state passes through on its way to files or back.
struct FileBuffer {
  absl::StatusOr<std::span<std::byte>> Of(int64_t bytes, MemoryLedger& ledger);

  PinnedMemory memory;
  MemoryLedger::Charge charge;
  int64_t predicted = 0;  // bytes: the most that a call has asked for
};

// The parts that a trainer calls.
struct CallParts {
  std::optional<CallBarrier> barrier;
  std::optional<Suspension> suspension;
  std::optional<AsyncReads> reads;
  std::optional<StateCalls> state;
  FileBuffer file_buffer;
  std::optional<Steps> steps;
};

struct EngineParts {
  explicit EngineParts(EngineInputs made_of);
  ~EngineParts();
  EngineParts(const EngineParts&) = delete;
  EngineParts& operator=(const EngineParts&) = delete;

  EngineInputs inputs;
  std::optional<sharding::HostRoom> host_room;  // before Create took the pools
  std::string run;
  std::vector<std::shared_ptr<FolderLock>> folder_locks;
  std::vector<std::string> damaged_checkpoints;
  EngineCalls calls;
  MemoryLedger ledger;
  StepTimeline timeline;
  EngineCommunicators communicators;
  CollectivePools collective_pools;
  RunnablePlans plans;
  std::optional<Program> program;  // what of it is public
  KernelParts kernels;
  std::optional<Storage> storage;
  std::optional<ControlBlock> control;
  OutcomeParts outcome;
  std::optional<SwapVerifier> verifier;
  UpdateParts updates;
  IssueParts issue;
  std::optional<StateAccess> state;
  ScopeParts scopes;
  CallParts call;
  // Declared last, so that they end first, because their tasks use the members above.
  EngineStreams streams;
};

// Makes the parts that follow from a plan: cells of memory, fragments with the order of their
// streams, and what scopes show. Once all that these parts work on is there; again for another
// plan, while nothing is under way. The parts stay at their addresses.
absl::Status LinkPlan(EngineParts& parts);

// The error of every call of an Engine that was moved from, or of its EngineState.
absl::Status MovedFrom();

}  // namespace ebb
