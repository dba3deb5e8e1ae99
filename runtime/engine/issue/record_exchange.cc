#include "ebb/runtime/engine/issue/record_exchange.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include "ebb/optim/update_constants.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/issue/issuer.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/sharding/interval.h"

namespace ebb {

using sharding::Role;

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

void RecordExchange::GiveTasks(Issuer& issuer) {
  const auto of_parity = [&](Role role, void (RecordExchange::*task)(int, Stream&)) {
    issuer.OnHost(role, [this, task](const LinkedList&, int, int parity, Stream& stream) {
      (this->*task)(parity, stream);
    });
  };
  const auto of_op = [&](Role role,
                         void (RecordExchange::*task)(const LinkedList&, int, int, Stream&)) {
    issuer.OnHost(role, [this, task](const LinkedList& run, int op, int parity, Stream& stream) {
      (this->*task)(run, op, parity, stream);
    });
  };
  of_parity(Role::kPrepare, &RecordExchange::Prepare);
  of_op(Role::kSeal, &RecordExchange::Seal);
  of_parity(Role::kConclude, &RecordExchange::Conclude);
  of_op(Role::kSealNorms, &RecordExchange::SealNorms);
  of_parity(Role::kConcludeNorms, &RecordExchange::ConcludeNorms);
}

// The last Finish has waited for the verdict of the step before where the host enqueues what needs
// it.
void RecordExchange::Prepare(int parity, Stream& stream) {
  const auto prepare = [this, parity, rate = learning_rate_] { outcome_.Prepare(parity, rate); };
  if (own_enqueues()) return prepare();
  stream.Enqueue(prepare);
}

void RecordExchange::Seal(const LinkedList& run, int op, int parity, Stream& stream) {
  stream.Enqueue([this, &run, op, parity] {
    outcome_.Seal(parity);
    NameNonFinite(run, op, parity);
  });
}

// Memory that the host does not reach is not read for a name.
void RecordExchange::NameNonFinite(const LinkedList& run, int op, int parity) const {
  ExchangeRecord& record = control_.own_record(parity);
  if (record.non_finite_unit < 0) return;
  const int operand = sharding::kSealShards + record.non_finite_unit;
  const std::span<const sharding::Operand> operands = run[op].operands;
  if (operand >= std::ssize(operands)) return;
  const sharding::Operand& shard = operands[static_cast<size_t>(operand)];
  if (shard.access == sharding::Access::kNone ||
      (shard.place.tier == Tier::kDevice && !HostReaches(core_.inputs.device)))
    return;
  const int64_t at = FirstNonFinite(run.At(op, operand), shard.encoding.dtype, shard.count);
  if (at == shard.count) return;
  const int64_t element = core_.slice * shard.count + at;
  const sharding::Section& section =
      sharding::SectionOf(core_.plans.plan(), record.non_finite_unit, /*trainable=*/true);
  for (const sharding::Interval& interval : sharding::IntervalsIn(section, element, element + 1))
    record.non_finite_parameter = static_cast<int32_t>(interval.parameter);
}

// One task: the first update waits for all that comes before it, and a GPU's stream stops for each.
// Where the host enqueues updates, it knows the verdict before it goes on.
void RecordExchange::Conclude(int parity, Stream& stream) {
  stream.Enqueue([this, parity] {
    outcome_.Conclude(parity, core_.communicators.of_verdict().status());
    peers_.NoteIfBroken(core_.communicators.of_verdict(),
                        [] { return std::string(sharding::Name(Role::kExchange)); });
  });
  stream.Record(core_.streams.concluded()[static_cast<size_t>(parity)]);
  if (own_enqueues()) peers_.AwaitConclusion(parity);
}

void RecordExchange::SealNorms(const LinkedList& run, int op, int parity, Stream& stream) {
  stream.Enqueue([this, &run, op, parity] {
    const bool on_device = run[op].operands.front().access != sharding::Access::kNone;
    norms_->Complete(on_device, reinterpret_cast<const optim::NormSums*>(run.At(op, 1)),
                     outcome_.exchange(parity), core_.errors.has_failed());
  });
}

void RecordExchange::ConcludeNorms(int parity, Stream& stream) {
  stream.Enqueue([this, parity] { SetTrustRatios(parity); });
}

// All ranks of a shard group set the same ratios, which follow from the records alone. If a rank
// has failed, or the communicator broke before a record came, no rank of the group updates. All
// ranks learn of the failure with the next exchange, as with a failure in a late update.
void RecordExchange::SetTrustRatios(int parity) {
  peers_.NoteIfBroken(core_.communicators.Along(sharding::StreamId::kReduce, kShardAxes),
                      [] { return std::string(sharding::Name(Role::kExchangeNorms)); });
  const StepScalars& scalars = constants_.of(parity, /*early=*/false);
  if (!scalars.apply) return;
  if (!norms_->Conclude(outcome_.exchange(parity)))
    return constants_.Set(parity, /*early=*/false, StepScalars());
  const std::span<optim::UpdateConstants> constants = control_.constants(parity, /*early=*/false);
  for (const NormExchange::Norms& norms : norms_->norms()) {
    const UpdateTable::Set& set = table_.sets()[static_cast<size_t>(norms.set)];
    optim::UpdateScalars of_set = constants_.ScalarsOf(set, scalars);
    const OptimizerConfig optimizer = constants_.OptimizerOf(set, scalars);
    of_set.trust_ratio =
        optim::TrustRatio(optimizer, norms.parameter_squares, norms.direction_squares);
    constants[static_cast<size_t>(norms.set)] = optim::UpdateConstantsOf(optimizer, of_set);
  }
}

}  // namespace ebb
