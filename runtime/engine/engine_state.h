// The state of an engine: parameters, masters, optimizer states, gradients, and the rest of a run.
// It is read and written by slices, gathered, copied, and read beside steps for a checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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

struct EngineMembers;
class FolderLock;  // ebb/runtime/checkpoint/folder_lock.h

// The base of Engine (engine.h) for its state.
class EngineState {
 public:
  // This rank's slices as fp32 on the host, at most 4 MiB a call, on the calling thread, in
  // declared order. Waits for pending updates and for ReadAsync. kParameter. kMaster: of frozen
  // parameters, and with ebb.stochastic_rounding of all, it is their value. kGradient: between
  // Step::Reduce and Finish, unscaled, not clipped. kOptimizer: by the state's name. Local, not
  // collective.
  using Sink = absl::FunctionRef<absl::Status(const Slice&, std::span<const float>)>;
  absl::Status Read(StateClass what, Sink sink, std::string_view optimizer_state = "");
  // The reverse: `source` is asked for this rank's slices. Between steps (of gradients: between
  // Step::Reduce and Finish). Every rank writes the same things before the next BeginStep or
  // BeginEvaluation; its scopes see them. A parameter and its master are one value: a write as
  // kParameter rounds both to the compute dtype; a write as kMaster keeps all bits of the master.
  absl::Status Write(StateClass what, const Initialiser& source,
                     std::string_view optimizer_state = "");
  // Both for one parameter alone. Others are not touched.
  absl::Status Read(ParameterId p, StateClass what, Sink sink,
                    std::string_view optimizer_state = "");
  absl::Status Write(ParameterId p, StateClass what, const Initialiser& source,
                     std::string_view optimizer_state = "");
  // Whether a unit's parameters are whole on every rank between steps: at stages 0 to 2, or if the
  // unit is kept whole. If they are, waits until they have the values of the last finished step, at
  // the addresses of Views. They stay there until the next BeginStep. Between steps, also in an
  // evaluation. After Write it is an error until a step or evaluation has begun. Local, not
  // collective.
  absl::StatusOr<bool> AwaitWhole(UnitId unit);
  // All state of this rank that a run goes on from, in the order of ReadAsync. With shard groups
  // (ebb.shard_group) only the ranks of the first group have any, because the others have the same.
  std::vector<StateSlice> StateSlices() const;
  // Gives these slices to `reader` beside the next steps: as the last step has left them. Each
  // slice comes before its next update, and that update waits for it. Collective, between steps;
  // returns once it is under way. Waits for the verdict on the last step, and for the end of the
  // call before. Memory: 16 MiB of host memory if state is on NVMe or on a GPU, in memory(); on a
  // GPU also 1 MiB of device memory. The result is ready when all ranks have ended, with one status
  // for all. Read, Write, Gather, CopyParametersFrom, SetTrainingState, Suspend, Reorder and the
  // engine's end wait for it; steps and evaluations do not.
  absl::StatusOr<std::shared_future<absl::Status>> ReadAsync(StateReader reader);
  // Whether this rank's last such call is under way; waits until it is over, between steps.
  bool IsReadingAsync() const;
  void AwaitAsyncRead() const;
  // A function that does the work which the last read waits for, without a step
  // (may_begin_in_step), on the thread that calls it. An error: a step is doing that, or another
  // thread has called it.
  std::function<absl::Status()> AsyncReadBegin() const;
  // Host memory for one call at a time that brings state to files or back, in memory(). It is kept.
  // With state on NVMe or a GPU a call that asks for less gives the rest back.
  absl::StatusOr<std::span<std::byte>> FileBuffer(int64_t bytes);
  // kResourceExhausted: the host, or a control group, had no room at Create for the pools and the
  // memory that a save takes. Local. Create warns of it, and CheckSaves refuses.
  absl::Status CheckRoomForSaves() const;
  // The run's state beside its tensors, with all finished steps: waits for the last step's verdict.
  // Local, and the same on every rank.
  absl::StatusOr<TrainingState> training_state();
  // Sets that state, to resume a run: the next step is state.finished_steps + 1, and there is no
  // Report until it has finished. Collective, between steps. Waits for pending updates. An error on
  // any rank, or states that differ, is every rank's error and nothing is set.
  absl::Status SetTrainingState(const TrainingState& state);
  // The run's name, so that a save removes no other run's checkpoints: empty until SaveCheckpoint
  // draws it or LoadCheckpoint takes the resumed run's. Rank 0's counts.
  std::string run() const;
  void SetRun(std::string run);
  // The locks of the last folders that the run saves to, until the engine's end. Null: the engine
  // was moved from.
  std::vector<std::shared_ptr<FolderLock>>* folder_locks();
  // Paths of checkpoints that a load has found damaged, so that a save counts none of them as one
  // that it keeps. Null: the engine was moved from.
  std::vector<std::string>* damaged_checkpoints();

  // Collective, between steps: one parameter's state whole, as fp32: what Read reads. root -1: on
  // every rank; else `whole` may be empty elsewhere. Gradients: between Step::Reduce and Finish.
  absl::Status Gather(ParameterId p, StateClass what, std::span<float> whole, int root = -1,
                      std::string_view optimizer_state = "");
  // Gathers it in pieces of at most 1 MiB, in the order of their elements, so that no rank needs
  // memory for the whole. `sink` is called on the ranks that get it, on the calling thread. The
  // first error of `sink` ends the calls, and is returned on that rank alone.
  absl::Status Gather(ParameterId p, StateClass what, Sink sink, int root = -1,
                      std::string_view optimizer_state = "");

  // Collective. Every parameter of this engine takes the value of the parameter with the same name
  // and shape in `other`, an engine of the same World. The value is the master if the parameter is
  // trainable there. Any stage, shard group, dtype, on either side trainable or frozen, either side
  // suspended. Masters are written and parameters cast from them as by an update; optimizer states
  // stay. The rest of `other` is left out; a name that it lacks is an error.
  //
  // Between steps of both. Waits for pending updates. Shards go to shards, resharded on the way.
  // Staging takes at most 8 MiB a rank in memory() for that time; on a GPU also 8 MiB of GPU
  // memory, which this engine keeps. An error on any rank is every rank's, and nothing was copied,
  // unless the engine says that it has failed.
  absl::Status CopyParametersFrom(EngineState& other);

  // Any thread: the names of the states of a parameter's optimizer. Empty: it is frozen, or no
  // parameter of this model.
  std::vector<std::string> optimizer_states(ParameterId parameter) const;

 protected:
  explicit EngineState(std::unique_ptr<EngineMembers> members);
  EngineState(EngineState&&) noexcept;
  EngineState& operator=(EngineState&&) noexcept;
  ~EngineState();

  std::unique_ptr<EngineMembers> members_;  // null: the engine was moved from
};

}  // namespace ebb
