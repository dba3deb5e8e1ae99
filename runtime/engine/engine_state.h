// The state that an engine holds: parameters, masters, optimizer states, gradients, and what the run is beside them. It
// is read and written by slices, gathered, copied from another engine, and read beside steps for a checkpoint.
#pragma once

#include <future>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/state_reader.h"
#include "ebb/runtime/engine/training_state.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/state.h"

namespace ebb {

struct EngineParts;

// Of an Engine (engine.h), which is one.
class EngineState {
 public:
  // This rank's slices as fp32 on the host, at most 4 MiB a call, on the calling thread, in
  // declared order. Waits for each unit's pending update only. kParameter, kMaster (of frozen
  // parameters, and with ebb.stochastic_rounding of all: their value), kGradient (between
  // Step::Reduce and Finish; unscaled, not clipped), kOptimizer by the state's name. Local, not
  // collective.
  using Sink = absl::FunctionRef<absl::Status(const Slice&, std::span<const float>)>;
  absl::Status Read(StateClass what, Sink sink, std::string_view optimizer_state = "");
  // The reverse: `source` is asked for this rank's slices. Between steps (of gradients: between
  // Step::Reduce and Finish). Every rank writes the same things before the next BeginStep or
  // BeginEvaluation; its scopes see them. A parameter and its master are one value: a write as
  // kParameter rounds both to the compute dtype; a write as kMaster keeps all bits of the master.
  absl::Status Write(StateClass what, const Initialiser& source,
                     std::string_view optimizer_state = "");
  // All state of this rank's that a run goes on from, in the order in which ReadAsync gives it. With shard groups
  // (ebb.shard_group) only the ranks of the first have any: the others' is the same.
  std::vector<StateSlice> StateSlices() const;
  // That, given to `reader` beside the steps that come:
  // as the last step has left them, each before its next update, which waits for it. Collective, between steps; returns
  // once it is on its way. Waits for the verdict on the last step, and for the end of the call before. Memory: 16 MiB of
  // host memory where state lives on NVMe or on a GPU, in memory(); on a GPU 1 MiB of its own, too. What it
  // returns is ready when all ranks have ended, with the same status on all. Read, Write, Gather,
  // CopyParametersFrom, SetTrainingState, Suspend, Reorder and the engine's end wait for it; steps and evaluations do
  // not.
  absl::StatusOr<std::shared_future<absl::Status>> ReadAsync(StateReader reader);
  // Of the last such call of this rank's: whether it has not ended; and until it has.
  bool IsReadingAsync() const;
  void AwaitAsyncRead() const;
  // What the run is beside its tensors. Of all finished steps: waits for the verdict on the last one.
  // Local, and the same on every rank.
  absl::StatusOr<TrainingState> training_state();
  // The reverse, as of a run that is resumed: the next step is state.finished_steps + 1, and until it
  // has finished there is no Report. Collective, between steps. It waits for pending updates. An error
  // on any rank, or states that differ, is every rank's error and nothing is set.
  absl::Status SetTrainingState(const TrainingState& state);
  // Which run this is, so that a save removes no other run's checkpoints: empty until SaveCheckpoint draws a name, or
  // LoadCheckpoint takes that of the run that goes on. This rank's; rank 0's counts.
  std::string run() const;
  void SetRun(std::string run);

  // Collective: one parameter's kMaster or kParameter whole, as fp32. root -1: on every rank; else
  // `whole` may be empty elsewhere.
  absl::Status Gather(ParameterId p, StateClass what, std::span<float> whole, int root = -1);
  // The same in pieces of at most 1 MiB, in the order of their elements, so that no rank needs memory
  // for the whole: `sink` is called where it is gathered to, on the calling thread. Its first error
  // ends the calls, and is returned on that rank alone.
  absl::Status Gather(ParameterId p, StateClass what, Sink sink, int root = -1);

  // Collective. Every parameter of this engine takes the value of the one of the same name and shape
  // in `other`, of the same World: the master where it is trainable there, else the parameter. Any
  // stage, shard group, dtype, on either side trainable or frozen, either side suspended. Masters are
  // written and parameters cast from them as an update does; optimizer states stay. What `other` has
  // beside these is left out; a name that it lacks is an error.
  //
  // Between steps of both. Waits for pending updates. Shards go to shards, resharded on the way, with
  // at most 8 MiB of staging a rank in memory() while it lasts; on a GPU with 8 MiB of its memory, too,
  // which this engine then keeps. An error on any rank is every rank's, and nothing was copied, unless
  // the engine says that it has failed.
  absl::Status CopyParametersFrom(EngineState& other);

  // Any thread: the names of the states that a parameter's optimizer keeps; of a frozen one there are none.
  std::vector<std::string> optimizer_states(ParameterId parameter) const;

 protected:
  explicit EngineState(std::unique_ptr<EngineParts> parts);
  EngineState(EngineState&&) noexcept;
  EngineState& operator=(EngineState&&) noexcept;
  ~EngineState();

  std::unique_ptr<EngineParts> parts_;  // null: the engine was moved from
};

}  // namespace ebb
