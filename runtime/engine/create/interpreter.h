// The parts of an engine that work on a plan in memory, in the order in which they are made. Each
// takes the core, and what it names of the engine and of the parts before it.
#pragma once

#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/issue/issuer.h"
#include "ebb/runtime/engine/issue/record_exchange.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/outcome/step_scalars.h"
#include "ebb/runtime/engine/ranks/call_barrier.h"
#include "ebb/runtime/engine/state/async_reads.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/runtime/engine/state/state_calls.h"
#include "ebb/runtime/engine/steps/list_runner.h"
#include "ebb/runtime/engine/steps/open_scopes.h"
#include "ebb/runtime/engine/steps/order_notices.h"
#include "ebb/runtime/engine/steps/paused_step.h"
#include "ebb/runtime/engine/steps/scope_views.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/runtime/engine/steps/steps.h"
#include "ebb/runtime/engine/steps/suspension.h"
#include "ebb/runtime/engine/steps/tensor_calls.h"
#include "ebb/runtime/engine/steps/view_errors.h"
#include "ebb/runtime/engine/updates/update_call.h"

namespace ebb {

struct EngineMembers;

struct Interpreter {
  explicit Interpreter(EngineMembers& engine);
  // The engine has linked another plan, while nothing is under way.
  void FollowPlan();

  const Core core;
  StepConstants constants;
  StepOutcome outcome;
  UpdateCall update;
  RecordExchange exchange;
  Issuer issuer;
  // Between a trainer's scopes and the plan.
  CallersCore callers_core;  // of the thread that opens scopes
  ViewErrors view_errors;
  StepProgress progress;
  OrderNotices notices;
  ListRunner runner;
  StateAccess state;
  ScopeViews views;
  OpenScopes scopes;
  PausedStep paused;
  TensorCalls tensor;
  // The calls of a trainer.
  CallBarrier barrier;
  Suspension suspension;
  AsyncReads reads;
  StateCalls state_calls;
  Steps steps;
};

}  // namespace ebb
