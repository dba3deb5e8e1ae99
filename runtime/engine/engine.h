// The engine keeps a model's parameters, gradients and optimizer states in shards over the ranks.
// It moves them so that each open scope has its data. It executes a program (program.h) that Create
// computes. A trainer may leave out scopes of the declared order, and may open a unit again.
//
//   auto engine = Engine::Create(world, device, model, config);
//   Step step = engine->BeginStep();
//   { ForwardScope unit = step.Forward(id);  ... unit.parameter(p) ... }
//   { BackwardScope unit = step.Backward(id); ... unit.gradient(p) += ... }
//   step.Finish();      // this rank's own error, if it has one by now
//   engine->Report();   // the step's verdict
//
// engine_state.h says how state is read, written, gathered, copied and saved.
//
// Not bound to a thread: calls must be ordered, from whichever thread. SPMD: every rank opens the
// same scopes in the same order, and a hash checks this with every step. On a GPU, work on a
// scope's views goes on compute_stream(), or joins it before the scope closes. On the CPU the
// calling thread is the compute stream. The engine outlives its scopes, Steps and Evaluations. A
// moved-from engine refuses every call; it has no world(), model(), program() and config().
//
// Several engines of one World: their calls must have one order too, the same on every rank. A call
// enqueues its collectives before it returns, so a rank's collectives are in the order of its
// calls. Steps and Evaluations of different engines may be open at once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/engine_state.h"
#include "ebb/runtime/engine/optimizer_spec.h"
#include "ebb/runtime/engine/program.h"
#include "ebb/runtime/engine/scope.h"
#include "ebb/runtime/engine/step.h"
#include "ebb/runtime/engine/tensor_axis.h"
#include "ebb/runtime/engine/tensor_view.h"
#include "ebb/sharding/mesh.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/state.h"

namespace ebb {

struct StepReport {
  int64_t step = 0;           // finished steps, this one included
  bool applied = false;       // false: skipped because of an overflow
  int64_t skipped_steps = 0;  // so far
  double loss = 0;            // over all ranks, see Step::AddLoss
  double gradient_norm = 0;   // global L2, unscaled, before clipping
  double loss_scale = 1;      // this step's
  double learning_rate = 0;   // this step's, of the ungrouped parameters
};

struct EngineOptions {
  // The trainer's stream; null on CUDA: the engine makes one. CUDA's default stream has a null
  // handle; its name here is cudaStreamLegacy.
  StreamView compute = {};
  std::optional<OptimizerSpec> optimizer = {};  // instead of the config's
  // Names logs, timelines, reports, and swap files in errors.
  std::string name = "engine";
  // Rank 0's initialisers give the values of all ranks: for values drawn in turn, or that only one
  // rank has. Only rank 0's are called, one at a time: a parameter's elements in order, unit by
  // unit, in each unit trainable parameters first. Create takes as long as rank 0 takes for the
  // whole model and its broadcast. The same on every rank.
  bool initial_values_of_rank_0 = false;
  // The ranks of all parts of a model that the trainer divides over tensor ranks by itself, each
  // part on an engine of its own: a world that World::Split has divided into the engines' worlds.
  // Norm, clipping, overflow, loss scale, errors, held-back steps and StepReport are then of all
  // these ranks, and losses and evaluations those of the first part. All parts begin and finish the
  // same steps and evaluations; they have the same units and parameters (ParameterSpec::over_tensor
  // says which are whole in each part), with shapes of their own. Other calls are of each part.
  std::optional<World> verdict = {};
  // The trainer's own error, which may be of this rank alone: Create returns it on every rank. The
  // model is then not looked at.
  absl::Status error = {};
};

// One parameter of Engine::Views.
struct ParameterView {
  ParameterId parameter{};
  TensorView value;
  std::optional<DType> gradient;  // the dtype of BackwardScope::gradient; none: it is frozen
};

class Engine : public EngineState {
 public:
  // Collective. Checks that model, config and plan agree over the ranks, lays out every pool, and
  // fills this rank's slices. An error names the rank and the first thing at fault. `world` on a
  // GPU: as the launcher or RunThreads gives it; its communicators are made for the device
  // (World::On). With ebb.mesh it is of all ranks; data ranks and verdict follow from the mesh, and
  // parameters with a split are cut over its tensor ranks. Every rank then gives the whole model.
  static absl::StatusOr<Engine> Create(World world, Device device, ModelSpec model,
                                       const Config& config, EngineOptions options = {});
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  ~Engine();

  StreamView compute_stream() const;
  // ModelSpec::workspace_bytes of device memory as kInt8, for the trainer between any two calls.
  MutableTensorView workspace() const;
  // Shape, dtype and address in every scope of a unit, so that a trainer makes its tensors once.
  // The address stays until Suspend or Reorder. The elements there are the parameter's only while a
  // scope of the unit is open. Empty: no unit of this model.
  std::vector<ParameterView> Views(UnitId unit) const;
  // Keeps the device memory behind Views, scopes and workspace() in place while the result lives,
  // even after the engine's end. The memory's contents are then undefined, and shapes of views are
  // gone. Meanwhile Suspend and Reorder give none of it back. The last owner to let go gives it
  // back, on any thread; on a GPU that waits for the device. Null: the engine was moved from.
  std::shared_ptr<void> HoldMemory();

  // Waits for the updates of the step before the last, so two steps are in the queues at most.
  Step BeginStep(StepOptions options = {});
  // `micro_batches`: of each walk through the model, as its scopes' micro_batches() has them. At
  // least 1. Where boundaries are the engine's, at most those for which the device's memory for
  // boundaries has room, which are those of a round or more: an error of the evaluation names them.
  Evaluation BeginEvaluation(int micro_batches = 1, EvaluationOptions options = {});

  // The report of the last finished step; waits for its verdict, and returns its error if it had
  // one. If the next step has begun and is before its Finish, Report does not wait for that step.
  // Report misses no step; the last step needs a Report of its own.
  absl::StatusOr<StepReport> Report();

  // Each is collective. For engines that share a device, between steps. Suspend waits for pending
  // updates, keeps parameters, masters and optimizer states on the host (tier kCpu of memory(); a
  // CPU device keeps them in place) and frees the memory of all other pools. Resume takes it again:
  // on all ranks or, if one lacks memory, on none. Training then goes on bit for bit, but scopes'
  // views and workspace() may be at other addresses.
  //
  // While suspended, Read, Write, Gather and CopyParametersFrom work on the state on the host, and
  // workspace() is empty. A Step or Evaluation gives no views, and its Finish and Report say why. A
  // second Suspend, and Resume without Suspend, are OK and change nothing. While a Step or
  // Evaluation is alive both are errors that leave it as it is.
  absl::Status Suspend();
  absl::Status Resume();

  // Collective, between steps: other visits and another order (ModelSpec::forward and
  // ModelSpec::order) of the same units and parameters. Parameters, masters and optimizer states
  // stay where they are. Training then goes on bit for bit like an engine that was created with
  // this order and given the same state. program(), model() and memory() are of the new order, and
  // after the next step traffic() and communication() are too; Report is still of the last step.
  // Scopes' views and workspace() may be at other addresses. Waits for pending updates and for the
  // end of a ReadAsync. Later ones, and StateSlices, follow the new order.
  //
  // Pools that change are freed before the new ones are taken. So memory never exceeds the need of
  // either order, except for memory that HoldMemory keeps. Masters and states stay in the tier that
  // they are in, which leaves staging what ebb.host_memory left it. An error of any rank is every
  // rank's, and the engine is as it was, unless the error says that it has failed. Errors: orders
  // that differ over the ranks, with the first difference; an order that Create would refuse; a
  // step is alive or the engine is suspended; memory or disk space is short. Other threads ask
  // nothing of the engine meanwhile.
  absl::Status Reorder(std::vector<Visit> forward, std::vector<ScopeEvent> order = {});

  // Collective, between steps: OK if every rank passes OK and the same `about`. Otherwise this
  // rank's own error, or the error of the first rank that has one, cut to 440 bytes. In a step the
  // error names the text of `about` before a colon as the call.
  absl::Status Agree(const absl::Status& own, std::string_view about = "");
  // Agree, and after OK the ranks' texts, by rank.
  absl::StatusOr<std::vector<std::string>> Exchange(const absl::Status& own, std::string_view about,
                                                    std::string_view text);

  // The tensor ranks of ebb.mesh, for the trainer's kernels.
  TensorAxis tensor();

  // Any thread.
  // The ranks that make calls between steps together, as Create was given them. Of parts that the
  // trainer divides by itself (ebb.mesh without ParameterSpec::split): the data ranks of this one.
  const World& world() const;
  // The ranks of a step's verdict, and this rank's number in mesh(). With EngineOptions::verdict it
  // may differ from the rank in that world.
  const Mesh& mesh() const;
  int rank_in_mesh() const;
  // The ranks with this rank's part of the model, that is with other samples, and this rank's number
  // among them: tensor ranks take the same samples.
  const World& data_world() const;
  int data_rank() const;
  int data_ranks() const;
  // The model of Create, cut (ParameterSpec::block) and divided (DivideByDType).
  const ModelSpec& model() const;
  std::vector<MemoryRow> memory() const;
  std::vector<TrafficRow> traffic()
      const;  // of the last finished step: nothing while all state is on the device
  std::vector<CommunicationRow> communication() const;  // of the last finished step
  const Program& program() const;                       // as long as the engine lives
  const Config& config() const;                         // resolved for this world

 private:
  explicit Engine(std::unique_ptr<EngineMembers> members);
};

}  // namespace ebb
