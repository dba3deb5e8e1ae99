#include "ebb/runtime/engine/issue/record_exchange.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include "ebb/optim/update_constants.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/unit_places.h"

namespace ebb {

using sharding::OperationKind;

namespace {

// The index of the first non-finite number of `count`; none: `count`.
int64_t FirstNonFinite(const std::byte* data, DType dtype, int64_t count) {
  const auto first = [&]<class T>(const T* numbers) {
    return std::find_if(numbers, numbers + count,
                        [](T number) { return !std::isfinite(static_cast<float>(number)); }) -
           numbers;
  };
  if (dtype == DType::kBFloat16) return first(reinterpret_cast<const BFloat16*>(data));
  if (dtype == DType::kFloat16) return first(reinterpret_cast<const Float16*>(data));
  return first(reinterpret_cast<const float*>(data));
}

}  // namespace

// The last Finish has waited for the verdict of the step before where the host enqueues what needs
// it.
void RecordExchange::Prepare(int parity, Stream& stream) {
  const auto prepare = [this, parity, rate = learning_rate_] {
    with_.outcome->Prepare(parity, rate);
  };
  if (with_.own_enqueues) return prepare();
  stream.Enqueue(prepare);
}

void RecordExchange::Seal(const LinkedFragment& run, int instruction, int parity, Stream& stream) {
  stream.Enqueue([this, &run, instruction, parity] {
    with_.outcome->Seal(parity);
    NameNonFinite(run, instruction, parity);
  });
}

// Memory that the host does not reach is not read for a name.
void RecordExchange::NameNonFinite(const LinkedFragment& run, int instruction, int parity) const {
  ExchangeRecord& record = with_.control->own_record(parity);
  if (record.non_finite_unit < 0) return;
  const int operand = sharding::kSealShards + record.non_finite_unit;
  const std::span<const sharding::Operand> operands = run[instruction].operands;
  if (operand >= std::ssize(operands)) return;
  const sharding::Operand& shard = operands[static_cast<size_t>(operand)];
  if (shard.access == sharding::Access::kNone ||
      (shard.place.tier == Tier::kDevice && !with_.reaches_device))
    return;
  const int64_t at = FirstNonFinite(run.At(instruction, operand), shard.dtype, shard.count);
  if (at == shard.count) return;
  const int64_t element = with_.shard * shard.count + at;
  const sharding::Section& section =
      sharding::SectionOf(*with_.plan, record.non_finite_unit, /*trainable=*/true);
  for (const sharding::Interval& interval : sharding::IntervalsIn(section, element, element + 1))
    record.non_finite_parameter = static_cast<int32_t>(interval.parameter);
}

// One task: the first update waits for all that comes before it, and a GPU's stream stops for each.
// Where the host enqueues updates, it knows the verdict before it goes on.
void RecordExchange::Conclude(int parity, Stream& stream) {
  stream.Enqueue([this, parity] {
    with_.outcome->Conclude(parity, with_.of_world->status());
    with_.peers->NoteIfBroken(*with_.of_world,
                              [] { return std::string(sharding::Name(OperationKind::kExchange)); });
  });
  stream.Record((*with_.concluded)[static_cast<size_t>(parity)]);
  if (with_.own_enqueues) with_.peers->AwaitConclusion(parity);
}

void RecordExchange::SealNorms(const LinkedFragment& run, int instruction, int parity,
                               Stream& stream) {
  stream.Enqueue([this, &run, instruction, parity] {
    const bool on_device = run[instruction].operands.front().access != sharding::Access::kNone;
    with_.norms->Complete(on_device,
                          reinterpret_cast<const optim::NormSums*>(run.At(instruction, 1)),
                          with_.outcome->exchange(parity), with_.errors->has_failed());
  });
}

void RecordExchange::ConcludeNorms(int parity, Stream& stream) {
  stream.Enqueue([this, parity] { SetTrustRatios(parity); });
}

// All ranks of a shard group set the same ratios, which follow from the records alone. If a rank
// has failed, or the communicator broke before a record came, no rank of the group updates. All
// ranks learn of the failure with the next exchange, as with a failure in a late update.
void RecordExchange::SetTrustRatios(int parity) {
  with_.peers->NoteIfBroken(
      *with_.of_shards, [] { return std::string(sharding::Name(OperationKind::kExchangeNorms)); });
  const StepScalars& scalars = with_.constants->of(parity, /*early=*/false);
  if (!scalars.apply) return;
  if (!with_.norms->Conclude(with_.outcome->exchange(parity)))
    return with_.constants->Set(parity, /*early=*/false, StepScalars());
  const std::span<optim::UpdateConstants> constants =
      with_.control->constants(parity, /*early=*/false);
  for (const NormExchange::Norms& norms : with_.norms->norms()) {
    const UpdateTable::Set& set = with_.table->sets()[static_cast<size_t>(norms.set)];
    optim::UpdateScalars of_set = with_.constants->ScalarsOf(set, scalars);
    const OptimizerConfig optimizer = with_.constants->OptimizerOf(set, scalars);
    of_set.trust_ratio =
        optim::TrustRatio(optimizer, norms.parameter_squares, norms.direction_squares);
    constants[static_cast<size_t>(norms.set)] = optim::UpdateConstantsOf(optimizer, of_set);
  }
}

}  // namespace ebb
