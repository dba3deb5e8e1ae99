// How gpt trains: the engine is made, and then each step walks through the model's layers, forward
// and backward.
#include "trainer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "status_macros.h"

namespace ebb::gpt {

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(World world, Device device,
                                                         const Options& options,
                                                         const Config& config, const Text& text) {
  std::unique_ptr<Trainer> trainer(new Trainer(std::move(world), std::move(device), options, text));
  GPT_RETURN_IF_ERROR(trainer->MakeEngine(config));
  if (trainer->device_.kind() == DeviceKind::kCuda) GPT_RETURN_IF_ERROR(trainer->SettleProducts());
  return trainer;
}

absl::Status Trainer::MakeEngine(const Config& config) {
  GPT_ASSIGN_OR_RETURN(work_, WorkloadOf(options_, config, device_));
  GPT_ASSIGN_OR_RETURN(engine_, Engine::Create(world_, device_, work_.spec, config));
  const std::span workspace(static_cast<std::byte*>(engine_->workspace().data),
                            static_cast<size_t>(work_.spec.workspace_bytes));
  const auto cut = static_cast<size_t>(work_.batches_bytes);
  const int64_t rows = work_.sequences * options_.shape.context;
  GPT_ASSIGN_OR_RETURN(batches_,
                       Batches::Create(device_, work_.micro_batches, rows, workspace.first(cut)));
  GPT_ASSIGN_OR_RETURN(layers_, Layers::Create(device_, work_.gpt, work_.layers,
                                               workspace.subspan(cut), engine_->tensor()));
  GPT_RETURN_IF_ERROR(layers_->Prepare(engine_->program().gradient()));
  return absl::OkStatus();
}

absl::Status Trainer::Step(int64_t step_number, Reported reported) {
  ebb::Step step = engine_->BeginStep();
  for (int round = 0; round < step.rounds(); ++round) RunRound(step, step_number);
  // Finish enqueues little, and the device has all of this step to do meanwhile.
  GPT_RETURN_IF_ERROR(AwaitReport(reported));
  if (absl::Status failed = status(); !failed.ok()) {
    return absl::Status(failed.code(),
                        absl::StrCat("in step ", step_number + 1, ": ", failed.message()));
  }
  GPT_RETURN_IF_ERROR(step.Finish());
  owes_report_ = true;
  return absl::OkStatus();
}

void Trainer::RunRound(ebb::Step& step, int64_t step_number) {
  {
    ForwardScope unit = step.Forward(work_.gpt.embedding);
    for (int m : unit.micro_batches()) {
      layers_->Embed(ScopeParameters{unit}, LoadBatch(step_number, m), unit.output(m).data);
    }
  }
  for (int64_t b = 0; b < options_.shape.layers; ++b) {
    ForwardScope unit = step.Forward(work_.gpt.blocks[b].unit);
    for (int m : unit.micro_batches()) {
      layers_->BlockForward(ScopeParameters{unit}, b, batches_->batch(m), unit.input(m).data,
                            SlotOf(unit, m, b), unit.output(m).data);
    }
  }
  {
    BackwardScope unit =
        step.Backward(work_.gpt.embedding);  // head and loss, forward and backward at once
    ScopeGradients gradients{unit};
    // Each block of the loss reads the scale, on a GPU from host memory. So it is not read where it
    // is 1.
    const bool scales = engine_->config().compute == DType::kFloat16;
    for (int m : unit.micro_batches()) {
      step.AddLoss(Scalar(layers_->HeadBackward(
          ScopeParameters{unit}, gradients, batches_->batch(m), unit.input(m).data,
          scales ? step.device_loss_scale().as<float>().data() : nullptr,
          unit.input_gradient(m).data)));
    }
  }
  for (int64_t b = options_.shape.layers; b-- > 0;) {
    BackwardScope unit = step.Backward(work_.gpt.blocks[b].unit);
    ScopeGradients gradients{unit};
    for (int m : unit.micro_batches()) {
      const Batch& batch = batches_->batch(m);
      const int64_t slot = SlotOf(unit, m, b);
      if (options_.recompute) {
        layers_->BlockForward(ScopeParameters{unit}, b, batch, unit.input(m).data, slot, nullptr);
      }
      layers_->BlockBackward(ScopeParameters{unit}, gradients, b, batch, unit.input(m).data, slot,
                             unit.output_gradient(m).data, unit.input_gradient(m).data);
    }
  }
  BackwardScope unit = step.Backward(work_.gpt.embedding);
  ScopeGradients gradients{unit};
  for (int m : unit.micro_batches()) {
    layers_->EmbedBackward(gradients, batches_->batch(m), unit.output_gradient(m).data);
  }
}

const Batch& Trainer::LoadBatch(int64_t step, int micro_batch) {
  const Batches::HostArrays host = batches_->Fill(micro_batch);
  const size_t length = static_cast<size_t>(options_.shape.context);
  const int64_t first =
      ((step * work_.micro_batches + micro_batch) * engine_->data_ranks() + engine_->data_rank()) *
      work_.sequences;
  for (int64_t s = 0; s < work_.sequences; ++s) {
    const size_t at = static_cast<size_t>(s) * length;
    text_status_.Update(text_.Training(options_.seed, static_cast<uint64_t>(first + s),
                                       host.tokens.subspan(at, length),
                                       host.targets.subspan(at, length)));
  }
  return batches_->Load(micro_batch, work_.sequences, options_.shape.context);
}

int64_t Trainer::SlotOf(const Scope& scope, int micro_batch, int64_t block) const {
  if (options_.recompute) return 0;
  return (micro_batch - scope.micro_batches().front()) * options_.shape.layers + block;
}

absl::Status Trainer::AwaitReport(Reported reported) {
  if (!std::exchange(owes_report_, false)) return absl::OkStatus();
  GPT_ASSIGN_OR_RETURN(const StepReport report, engine_->Report());
  reported(report);
  return absl::OkStatus();
}

int64_t Trainer::tokens_per_step() const {
  return engine_->data_ranks() * work_.micro_batches * work_.sequences * options_.shape.context;
}

}  // namespace ebb::gpt
