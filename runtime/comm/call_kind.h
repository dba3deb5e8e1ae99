// Kinds of what ranks do alike: the calls that all of them make, and the scopes of an engine.
#pragma once

#include <cstdint>

namespace ebb {

enum class CallKind : uint8_t {
  kNone,
  kCommunicator,
  kCreate,
  kStep,
  kStepWithWritten,  // which passes on what was written from outside
  kEvaluation,
  kEvaluationWithWritten,
  kFinish,
  kFinishEvaluation,
  kGather,
  // Ranks that call different ones of these still meet, and each gets a Status
  // (engine/outcome/outcome_messages.cc).
  kSuspend,
  kResume,
  kCopy,
  kCopyFrom,  // the same call, for the engine that is copied
  kSetTrainingState,
  kAgree,
  kReadAsync,
  kReorder,
  // Only in the log of an engine (wait_cycles.h). A rank may drop its last step when it is slower.
  kDrop,
  kTensorAllReduce,
  kTensorAllGather,
  kTensorReduceScatter,
  kForward,
  kBackward,
  kRecompute,
};

// A step or an evaluation.
inline bool Begins(CallKind kind) {
  return kind >= CallKind::kStep && kind <= CallKind::kEvaluationWithWritten;
}
inline bool Finishes(CallKind kind) {
  return kind == CallKind::kFinish || kind == CallKind::kFinishEvaluation;
}
inline bool Meets(CallKind kind) {
  return kind >= CallKind::kSuspend && kind <= CallKind::kReorder;
}
inline bool IsScope(CallKind kind) {
  return kind >= CallKind::kForward;
}
// A log has these within steps and evaluations alone.
inline bool IsWithin(CallKind kind) {
  return kind >= CallKind::kTensorAllReduce;
}

}  // namespace ebb
