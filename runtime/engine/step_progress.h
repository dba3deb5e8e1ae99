// How far the step or evaluation that is alive has come, and which scopes are open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ebb/runtime/engine/call_log.h"
#include "ebb/runtime/engine/missing_backwards.h"
#include "ebb/runtime/engine/runnable.h"
#include "ebb/runtime/engine/scope_trail.h"
#include "ebb/runtime/engine/step.h"
#include "ebb/runtime/engine/step_tag.h"
#include "ebb/sharding/order.h"

namespace ebb {

struct OpenScope {
  int64_t id = 0;
  int planned = -1;        // scope of the plan; -1: none of its, which is open again
  bool displaces = false;  // gathered over what the plan has there
  int unit = 0, visit = 0, round = 0;
  sharding::ScopeKind kind{};
  int64_t opened_ns = 0;
};

// Reset in place, so that a step allocates nothing.
struct StepProgress {
  bool alive = false, evaluation = false;
  int64_t number = 0;
  TraceLabel trace;
  int parity = 0;  // not that of the step that finished last, whose updates may still run
  StepOptions options;
  int micro_batches = 0;
  double divisor = 1, gradient_scale = 1;
  Runnable* run = nullptr;
  LinkedFragment* fragment = nullptr;  // of it
  size_t moment = 0;                   // the next of the plan
  sharding::OrderProgress order;
  std::vector<uint8_t> awaited;  // by moment: its kernels wait for what they need
  bool any_backward = false, reduced = false;
  Evaluation::Sums sums = {};  // the counts; values come from the device. The loss is the first
  CallLog log;
  MissingBackwards backwards;  // of a step
  ScopeTrail trail;            // the same for the ranks' records; of a step
  std::vector<OpenScope> open;

  // As the declared order has it.
  const sharding::Plan& plan() const { return run->plan; }
  OpenScope* Find(int64_t scope);
  // What the declared order has next, as a log has it.
  int NextCode() const;
};

}  // namespace ebb
