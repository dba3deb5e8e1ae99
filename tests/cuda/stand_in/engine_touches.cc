// What an engine's host touches of memory that the device reaches, told to the check of the order
// (order.h): takes the place of runtime/engine/host_touches.cc.
//
// A transfer with the swap file is noted where it starts and where it ends: who uses its memory next
// has to wait for the end, and it for all who used it before.
#include <span>
#include <vector>

#include "ebb/optim/norm.h"
#include "ebb/runtime/device/cuda/cuda_host_stream.h"
#include "ebb/runtime/engine/executor.h"
#include "order.h"

namespace ebb {
namespace {

using sharding::Operation;
using sharding::OperationKind;
using sharding::Place;
using stand_in::Reads;
using stand_in::Touched;
using stand_in::Writes;

// Null: the CPU's.
cudaStream_t NativeOf(const Stream& stream) {
  if (stream.view().native != nullptr) return static_cast<cudaStream_t>(stream.view().native);
  const auto* const host = dynamic_cast<const CudaHostStream*>(&stream.backend());
  return host == nullptr ? nullptr : host->crossing();
}

// A device that has failed takes no waits any more, and runs nothing that they would order.
bool IsOrdered(const Device& device) {
  return stand_in::WatchesOrder() && device.status().ok();
}

const char* NameOf(const Operation& operation) {
  switch (operation.kind) {
    case OperationKind::kRead:
      return "the host's read of the swap file";
    case OperationKind::kWrite:
      return "the host's write of the swap file";
    case OperationKind::kAccumulate:
      return "the host's sum";
    case OperationKind::kNorm:
      return "the host's norm";
    case OperationKind::kNarrow:
      return "the host's cast of masters";
    case OperationKind::kParameterNorms:
      return "the host's norms of parameters";
    default:
      return "the host's update";
  }
}

}  // namespace

void Executor::NoteTransfers(Stream& stream, const Operation& operation) {
  const cudaStream_t native = NativeOf(stream);
  if (native == nullptr || !IsOrdered(device_)) return;
  std::vector<Touched> touched;
  for (const sharding::Move& move : operation.moves) {
    touched.push_back(operation.kind == OperationKind::kRead
                          ? Writes(storage_->At(move.to), move.bytes)
                          : Reads(storage_->At(move.from), move.bytes));
  }
  stand_in::NoteTouch(native, NameOf(operation), touched);
}

void Executor::NoteWork(Stream& stream, const Runnable& run, int index, StepTag step) {
  const cudaStream_t native = NativeOf(stream);
  // Kernels that enqueue themselves are noted where they are launched.
  if (native == nullptr || KernelsOf(stream).enqueues() || !IsOrdered(device_)) return;
  const sharding::Plan& of = run.plan;
  const Operation& operation = of.operations[static_cast<size_t>(index)];
  const sharding::Decisions& decisions = of.decisions;
  std::vector<Touched> touched;
  const auto update = [&](const sharding::UpdateWork& work) {
    const int64_t count =
        plan().pools.homes.sub_groups[static_cast<size_t>(work.sub_group)].count();
    touched.push_back(
        Reads(storage_->At(work.gradient), count * SizeOf(decisions.shard_dtype(work.unit))));
    if (decisions.master_size() > 0)
      touched.push_back(Writes(storage_->At(work.master), count * decisions.master_size()));
    for (int k = 0; k < decisions.optimizer_states; ++k) {
      touched.push_back(
          Writes(storage_->At(work.states.Plus(k * work.states_stride)), count * int64_t{4}));
    }
    if (work.writes_parameter)
      touched.push_back(Writes(storage_->At(work.parameter), count * SizeOf(decisions.compute)));
    const bool early = decisions.timing == sharding::UpdateTiming::kEarly &&
                       operation.condition != sharding::Condition::kCarrying;
    const auto constants = control_block_->constants(step.parity, early);
    touched.push_back(Reads(constants.data(), constants.size_bytes()));
    if (!decisions.own_optimizer) return;
    touched.push_back(Writes(storage_->GradientStaging(Tier::kCpu), count * int64_t{4}));
    if (decisions.reads_parameters())
      touched.push_back(Writes(storage_->MasterStaging(Tier::kCpu), count * int64_t{4}));
  };
  const auto norms = [&](const sharding::UpdateWork& work) {
    const int64_t count =
        plan().pools.homes.sub_groups[static_cast<size_t>(work.sub_group)].count();
    touched.push_back(
        Reads(storage_->At(work.gradient), count * SizeOf(decisions.shard_dtype(work.unit))));
    if (decisions.master_size() > 0)
      touched.push_back(Reads(storage_->At(work.master), count * decisions.master_size()));
    for (int k = 0; k < decisions.norm_states[static_cast<size_t>(work.unit)]; ++k) {
      touched.push_back(
          Reads(storage_->At(work.states.Plus(k * work.states_stride)), count * int64_t{4}));
    }
    if (decisions.reads_parameters())
      touched.push_back(Reads(storage_->At(work.parameter), count * SizeOf(decisions.compute)));
    const auto constants = control_block_->constants(step.parity, /*early=*/false);
    touched.push_back(Reads(constants.data(), constants.size_bytes()));
    const std::span<optim::NormSums> sums = NormSumsOn(/*device=*/false);
    touched.push_back(Writes(sums.data(), sums.size_bytes()));
  };
  for (const sharding::Part& part : operation.parts) {
    const int64_t shard = of.layout.units[static_cast<size_t>(part.unit)].trainable.shard;
    switch (operation.kind) {
      case OperationKind::kAccumulate:
        touched.push_back(Reads(ReducedSlice(of, part), shard * SizeOf(decisions.communication)));
        touched.push_back(
            Writes(ShardOf(of, part), shard * SizeOf(decisions.shard_dtype(part.unit))));
        break;
      case OperationKind::kNorm:
        touched.push_back(
            Reads(ShardOf(of, part), shard * SizeOf(decisions.shard_dtype(part.unit))));
        break;
      case OperationKind::kParameterNorms:
        norms(of.works[static_cast<size_t>(part.work)]);
        break;
      case OperationKind::kUpdate:
        update(of.works[static_cast<size_t>(part.work)]);
        break;
      case OperationKind::kNarrow: {
        const sharding::Narrowing& narrowing = of.narrowings[static_cast<size_t>(part.work)];
        const int64_t count =
            plan().pools.homes.sub_groups[static_cast<size_t>(narrowing.sub_group)].count();
        touched.push_back(Reads(storage_->At(narrowing.master), count * decisions.master_size()));
        touched.push_back(
            Writes(storage_->At(narrowing.parameter), count * SizeOf(decisions.compute)));
        break;
      }
      default:
        break;
    }
    if (operation.kind == OperationKind::kNorm ||
        (operation.kind == OperationKind::kAccumulate && part.last)) {
      const std::span<double> scratch = NormScratch(part.unit);
      touched.push_back(Writes(scratch.data(), scratch.size_bytes()));
      touched.push_back(Writes(&control_block_->square(part.unit), sizeof(double)));
    }
  }
  stand_in::NoteTouch(native, NameOf(operation), touched);
}

void Executor::NoteSettled(int unit) {
  if (!IsOrdered(device_)) return;
  std::vector<Touched> touched = {Writes(&control_block_->square(unit), sizeof(double))};
  const std::span<double> scratch = NormScratch(unit);
  touched.push_back(Writes(scratch.data(), scratch.size_bytes()));
  const Place shard = plan().pools.GradientShard(unit);
  if (shard.tier != Tier::kNvme) {
    touched.push_back(Writes(storage_->GradientSlice(unit),
                             plan().layout.units[static_cast<size_t>(unit)].trainable.shard *
                                 SizeOf(plan().decisions.shard_dtype(unit))));
  }
  stand_in::NoteHostTouch("the calling thread's sum", touched);
}

void Executor::NoteVerdict(VerdictTouch what, int parity) {
  if (device_.kind() != DeviceKind::kCuda || !IsOrdered(device_)) return;
  const ControlBlock& block = *control_block_;
  const auto all = [](auto span) { return Writes(span.data(), span.size_bytes()); };
  const auto on_stream = [&](const char* name, std::span<const Touched> touched) {
    stand_in::NoteTouch(NativeOf(*reduce_), name, touched);
  };
  switch (what) {
    case VerdictTouch::kBeginLoss: {
      const Touched touched[] = {all(block.sums(parity))};
      return stand_in::NoteHostTouch("the begin of a step", touched);
    }
    case VerdictTouch::kBeginRecord: {
      const Touched touched[] = {Writes(&block.own_record(parity), sizeof(ExchangeRecord))};
      return stand_in::NoteHostTouch("the begin of a rank's record", touched);
    }
    case VerdictTouch::kReadScale: {
      const Touched touched[] = {Reads(&block.loss_scale(), sizeof(float))};
      return stand_in::NoteHostTouch("the host's look at the loss scale", touched);
    }
    case VerdictTouch::kEarlyConstants: {
      const Touched touched[] = {all(block.constants(parity, /*early=*/true))};
      if (own_optimizer_enqueues_) return stand_in::NoteHostTouch("early constants", touched);
      return on_stream("early constants", touched);
    }
    case VerdictTouch::kCompleteRecord: {
      std::vector<Touched> touched = {
          Writes(&block.own_record(parity), sizeof(ExchangeRecord)),
          Reads(block.sums(parity).data(), block.sums(parity).size_bytes())};
      for (size_t u = 0; u < model_.units.size() && !progress_.evaluation; ++u) {
        if (plan().decisions.trainable[u])
          touched.push_back(Reads(&block.square(static_cast<int>(u)), sizeof(double)));
      }
      return on_stream("the end of a rank's record", touched);
    }
    case VerdictTouch::kConclude: {
      const auto records = block.records(parity);
      std::vector<Touched> touched = {Reads(records.data(), records.size_bytes())};
      if (!progress_.evaluation) {
        touched.push_back(all(block.constants(parity, /*early=*/false)));
        if (config_.compute == DType::kFloat16)
          touched.push_back(Writes(&block.loss_scale(), sizeof(float)));
      }
      return on_stream("the verdict", touched);
    }
    case VerdictTouch::kCompleteNorms: {
      std::vector<Touched> touched = {all(norms_->own_record()), all(norms_->device_sums())};
      if (norms_->sums_on_host()) {
        const std::span<optim::NormSums> sums = NormSumsOn(/*device=*/false);
        touched.push_back(Reads(sums.data(), sums.size_bytes()));
      }
      return on_stream("the end of a rank's norms", touched);
    }
    case VerdictTouch::kConcludeNorms: {
      const Touched touched[] = {Reads(norms_->records().data(), norms_->records().size_bytes()),
                                 all(block.constants(parity, /*early=*/false))};
      return on_stream("the norms of all ranks", touched);
    }
  }
}

}  // namespace ebb
