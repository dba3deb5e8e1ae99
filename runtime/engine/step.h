// One optimizer step, and one evaluation: the objects scopes come from. Move-only; one of either
// alive per engine.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/scope.h"
#include "ebb/runtime/engine/tensor_view.h"
#include "ebb/sharding/model.h"

namespace ebb {

struct StepOptions {
  int micro_batches = 0;  // 0: gradient_accumulation_steps of the config
  double gradient_divisor =
      0;  // global. 0: world * micro_batches; else, for example, the tokens of all ranks
  // Instead of the schedule's and of the groups' own; a group's lr_factor scales it.
  std::optional<double> learning_rate = {};
  bool hold_updates = false;  // no update before Finish(): gradients readable, step droppable
  // With ebb.strict (the default): this step may leave out the backward of trainable visits, and rounds.
  // What is left out adds zero to its gradient. Else it is an error, which Reduce and Finish return; where
  // early updates were made before it was known, the engine has failed. The same on every rank. It
  // changes nothing where boundary activations are the engine's, which need every visit.
  bool may_leave_out = false;
};

// BeginStep ... rounds of Forward and Backward ... Finish. Destroyed unfinished, it is dropped with
// its gradients: nothing of it remains, unless updates had started (asynchronous_step early,
// without hold_updates), which fails the engine.
class Step {
 public:
  Step() = default;
  Step(Step&& other) noexcept { *this = static_cast<Step&&>(other); }
  Step& operator=(Step&& other) noexcept;
  ~Step();

  // Walks through the model: micro_batches over ebb.micro_batches_per_round.
  int rounds() const;
  // The next visit of `unit` in this round. Off the declared order it is gathered on demand, with
  // one warning; where boundaries belong to the engine that is an error. The last visit's Forward
  // may be left out (head and loss fused into its backward). A Backward of a trainable visit may not,
  // unless StepOptions::may_leave_out or ebb.strict says so.
  ForwardScope Forward(UnitId unit);
  BackwardScope Backward(UnitId unit);
  // What the loss is to be multiplied with before backward; 1 unless fp16, where it waits for the
  // last step's overflow flag.
  float loss_scale() const;
  // The same as an fp32 scalar on the device, in stream order: no host wait on a GPU.
  TensorView device_loss_scale() const;
  // Adds one fp32 scalar on the device, unscaled. StepReport::loss is the sum over calls and ranks
  // over the gradient divisor: by default the mean over micro-batches and ranks.
  void AddLoss(TensorView scalar);
  // Optional, with hold_updates: makes the gradients final, so that Engine::Read may see them
  // and no Backward may follow.
  absl::Status Reduce();
  // Closes what is open; issues norm, clip and update. The first error of the step, if any: then
  // nothing was updated, or the engine says that it has failed.
  //
  // On the CPU it waits until the ranks have exchanged norms and errors, and all of them return the
  // same. So it does on a GPU where updates are off, or where an optimizer of the trainer's updates
  // what is on the device. Else on a GPU it only enqueues: updates look at the device whether they
  // are to happen. It returns what this rank knows by then, which is its own errors; those of others
  // and what the exchange shows (Engine::Report) are returned by the first call that learns of them:
  // Report, Read, Write, Gather, an Evaluation, Suspend, CopyParametersFrom, or the Finish of the step
  // after the next. Steps until then are dropped too.
  absl::Status Finish();

 private:
  friend class Engine;
  explicit Step(Executor* executor, int64_t number) : executor_(executor), number_(number) {}

  Executor* executor_ = nullptr;
  int64_t number_ = 0;
};

// One of an evaluation's sums, over calls and all ranks.
struct EvaluationSum {
  double sum = 0;
  int64_t count = 0;  // calls that added to it
  double mean() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
};

// Forward only, any number of walks through the model; sees the finished updates, unit by unit.
class Evaluation {
 public:
  static constexpr int kSums = 8;
  using Sums = std::array<EvaluationSum, kSums>;

  Evaluation() = default;
  Evaluation(Evaluation&& other) noexcept { *this = static_cast<Evaluation&&>(other); }
  Evaluation& operator=(Evaluation&& other) noexcept;
  ~Evaluation();

  ForwardScope Forward(UnitId unit);
  // Adds one fp32 scalar on the device to sum number `sum`, 0 ... kSums - 1. Which is what is the
  // trainer's matter, but for 0, which is the loss.
  void Add(int sum, TensorView scalar);
  void AddLoss(TensorView scalar) { Add(0, scalar); }
  // The mean of the losses that were added, over calls and all ranks. Waits. Collective.
  absl::StatusOr<double> Finish();
  // The same, with all sums: loss, right answers, tokens ...
  absl::StatusOr<Sums> FinishSums();

 private:
  friend class Engine;
  explicit Evaluation(Executor* executor, int64_t number) : executor_(executor), number_(number) {}

  Executor* executor_ = nullptr;
  int64_t number_ = 0;
};

}  // namespace ebb
