// Before updates by LAMB and LARS: this rank's sums, and what ranks conclude from those of all.
#include "ebb/optim/update_constants.h"
#include "ebb/runtime/engine/executor.h"

namespace ebb {

std::span<optim::NormSums> Executor::NormSumsOn(bool device) const {
  const sharding::Pools& pools = plan().pools;
  std::byte* const at =
      device ? storage_->Staging(pools.staging_norm_sums) : storage_->At(pools.host_norm_sums);
  return {reinterpret_cast<optim::NormSums*>(at), norms_->sums()};
}

// On the stream of the update to come, which reads the same. Nothing is written but the sums. A rank that
// cannot take them says so with its record, and no rank updates anything.
void Executor::RunParameterNorms(const sharding::UpdateWork& work, int parity, bool first,
                                 Stream& stream) {
  const sharding::SubGroup& group =
      plan().pools.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  const std::span<optim::NormSums> sums = NormSumsOn(group.tier == Tier::kDevice);
  if (first) KernelsOf(stream).ClearNorms(stream, sums);
  const bool known = !KernelsOf(stream).enqueues();
  if ((known && !step_constants_->of(parity, /*early=*/false).apply) || errors_.has_failed())
    return;
  const int states = plan().decisions.norm_states[static_cast<size_t>(work.unit)];
  if (swap_verifier_->Verifies(group) &&
      !swap_verifier_->AgreeStates(group, swap_verifier_->SumStates(work, stream.team(), states),
                                   states))
    return;
  ForEachPart(work, parity, /*early=*/false, stream, [&](const PartOfUpdate& part) {
    if (!optim::TakesNorms(part.rule)) return;
    KernelsOf(stream).SumNorms(stream, part.rule, part.arrays, part.runs,
                               sums.subspan(static_cast<size_t>(part.first_set)));
  });
}

void Executor::EnqueueNormExchange(Runnable& run, int index, StepTag step) {
  const int parity = step.parity;
  TraceBegin(*reduce_, run, index);
  if (norms_->sums_on_device()) {
    const std::span<optim::NormSums> copy = norms_->device_sums();
    reduce_->Copy(copy.data(), NormSumsOn(/*device=*/true).data(),
                  static_cast<int64_t>(copy.size_bytes()));
  }
  NoteVerdict(VerdictTouch::kCompleteNorms, parity);
  reduce_->Enqueue([this, parity] {
    norms_->Complete(
        norms_->sums_on_host() ? NormSumsOn(/*device=*/false) : std::span<optim::NormSums>(),
        outcome_->exchange(parity), errors_.has_failed());
  });
  if (norms_->exchanged()) {
    const std::span<std::byte> own = norms_->own_record(), all = norms_->records();
    std::byte* const records = storage_->Staging(plan().pools.staging_norm_records);
    reduce_->Copy(records + all.size(), own.data(), static_cast<int64_t>(own.size()));
    norm_spans_[parity] = {.send = records + all.size(),
                           .receive = records,
                           .count = static_cast<int64_t>(own.size())};
    Communicator& communicator = CommunicatorOf(sharding::OperationKind::kExchangeNorms);
    Compute(*reduce_, [this, &run, index] { Began(run, index); });
    NoteCollective(communicator,
                   communicator.AllGather(*reduce_, {&norm_spans_[parity], 1}, DType::kInt8));
    Compute(*reduce_, [this, &run, index, step] { Ended(run, index, step); });
    reduce_->Copy(all.data(), records, static_cast<int64_t>(all.size()));
  }
  NoteVerdict(VerdictTouch::kConcludeNorms, parity);
  reduce_->Enqueue([this, parity] { ConcludeNorms(parity); });
  control_block_->CopyConstants(*reduce_, parity, /*early=*/false);
  TraceEnd(*reduce_, run, index, step);
}

// The same on every rank of a shard group, as it follows from the records alone. Where a rank has failed, or a
// record has not come as the communicator is broken, none of them updates anything; all learn of the failure
// as they do of one in a late update, with the next exchange.
void Executor::ConcludeNorms(int parity) {
  const StepScalars& scalars = step_constants_->of(parity, /*early=*/false);
  if (!scalars.apply) return;
  if (!norms_->Conclude(outcome_->exchange(parity)))
    return step_constants_->Set(parity, /*early=*/false, StepScalars());
  const std::span<optim::UpdateConstants> constants =
      control_block_->constants(parity, /*early=*/false);
  for (const NormExchange::Norms& norms : norms_->norms()) {
    const UpdateTable::Set& set = update_table_.sets()[static_cast<size_t>(norms.set)];
    optim::UpdateScalars of_set = step_constants_->ScalarsOf(set, scalars);
    const OptimizerConfig optimizer = step_constants_->OptimizerOf(set, scalars);
    of_set.trust_ratio =
        optim::TrustRatio(optimizer, norms.parameter_squares, norms.direction_squares);
    constants[static_cast<size_t>(norms.set)] = optim::UpdateConstantsOf(optimizer, of_set);
  }
}

}  // namespace ebb
