#include "ebb/runtime/engine/record_exchange.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "ebb/optim/update_constants.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/state_pieces.h"
#include "ebb/sharding/unit_places.h"

namespace ebb {

using sharding::OperationKind;

namespace {

// Of `count` numbers; none: `count`.
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

// The last Finish has waited for the verdict of the step before where the host enqueues what needs it.
void RecordExchange::Prepare(int parity) {
  const auto prepare = [this, parity, rate = learning_rate_] {
    with_.outcome->Prepare(parity, rate);
  };
  if (with_.own_enqueues) return prepare();
  with_.reduce->Enqueue(prepare);
  with_.control->CopyConstants(*with_.reduce, parity, /*early=*/true);
}

void RecordExchange::Exchange(int parity) {
  Stream& reduce = *with_.reduce;
  reduce.Enqueue([this, parity] {
    with_.outcome->Seal(parity);
    NameNonFinite(parity);
  });
  const auto own = static_cast<int64_t>(sizeof(ExchangeRecord)),
             all = static_cast<int64_t>(with_.control->records(parity).size_bytes());
  std::byte* const records = with_.storage->At(sharding::RecordsPlace(*with_.plan));
  reduce.Copy(records + all, &with_.control->own_record(parity), own);
  records_[parity] = {.send = records + all, .receive = records, .count = sharding::kExchangeBytes};
  with_.peers->NoteCollective(
      *with_.of_world, with_.of_world->AllGather(reduce, {&records_[parity], 1}, DType::kInt8),
      *with_.errors);
  reduce.Copy(with_.control->records(parity).data(), records, all);
  // One task: the first update waits for all that comes before it, and a GPU's stream stops for each.
  reduce.Enqueue([this, parity] {
    with_.outcome->Conclude(parity, with_.of_world->status());
    with_.peers->NoteIfBroken(*with_.of_world,
                              [] { return std::string(sharding::Name(OperationKind::kExchange)); });
  });
  const bool is_step = parity != ControlBlock::kEvaluation;
  if (is_step) with_.control->CopyConstants(reduce, parity, /*early=*/false);
}

// Where updates wait for this exchange the shard is as it was when its squares were summed. What the host does not
// reach is not read for it.
void RecordExchange::NameNonFinite(int parity) const {
  ExchangeRecord& record = with_.control->own_record(parity);
  if (record.non_finite_unit < 0 ||
      sharding::TimingOf(*with_.plan) == sharding::UpdateTiming::kEarly)
    return;
  const int unit = record.non_finite_unit;
  const sharding::Section& section = sharding::SectionOf(*with_.plan, unit, /*trainable=*/true);
  for (const sharding::StateRun& run : sharding::RunsOf(
           *with_.plan, with_.shard,
           {.array = {.what = StateClass::kGradient, .unit = unit}, .end = section.shard})) {
    const sharding::Operand& home = run.homes[0];
    const bool reaches =
        home.place.tier == Tier::kCpu || (home.place.tier == Tier::kDevice && with_.reaches_device);
    if (!reaches) continue;
    const int64_t at = FirstNonFinite(with_.storage->At(home.place), home.dtype, run.count());
    if (at == run.count()) continue;
    const int64_t element = with_.shard * section.shard + run.begin + at;
    for (const sharding::Interval& interval : sharding::IntervalsIn(section, element, element + 1))
      record.non_finite_parameter = static_cast<int32_t>(interval.parameter);
    return;
  }
}

void RecordExchange::RecordConclusion(int parity) {
  with_.reduce->Record((*with_.concluded)[static_cast<size_t>(parity)]);
}

std::span<optim::NormSums> RecordExchange::SumsOn(bool device) const {
  const sharding::Pools& pools = with_.plan->pools;
  std::byte* const at = with_.storage->At(device ? sharding::StagingPlace(pools.staging_norm_sums)
                                                 : pools.host_norm_sums);
  return {reinterpret_cast<optim::NormSums*>(at), with_.norms->sums()};
}

void RecordExchange::ExchangeNorms(int parity) {
  Stream& reduce = *with_.reduce;
  NormExchange& norms = *with_.norms;
  if (norms.sums_on_device()) {
    const std::span<optim::NormSums> copy = norms.device_sums();
    reduce.Copy(copy.data(), SumsOn(/*device=*/true).data(),
                static_cast<int64_t>(copy.size_bytes()));
  }
  reduce.Enqueue([this, parity] {
    with_.norms->Complete(
        with_.norms->sums_on_host() ? SumsOn(/*device=*/false) : std::span<optim::NormSums>(),
        with_.outcome->exchange(parity), with_.errors->has_failed());
  });
  if (norms.exchanged()) {
    const std::span<std::byte> own = norms.own_record(), all = norms.records();
    std::byte* const records =
        with_.storage->At(sharding::StagingPlace(with_.plan->pools.staging_norm_records));
    reduce.Copy(records + all.size(), own.data(), static_cast<int64_t>(own.size()));
    norms_[parity] = {.send = records + all.size(),
                      .receive = records,
                      .count = static_cast<int64_t>(own.size())};
    with_.peers->NoteCollective(
        *with_.of_shards, with_.of_shards->AllGather(reduce, {&norms_[parity], 1}, DType::kInt8),
        *with_.errors);
    reduce.Copy(all.data(), records, static_cast<int64_t>(all.size()));
  }
  reduce.Enqueue([this, parity] { ConcludeNorms(parity); });
  with_.control->CopyConstants(reduce, parity, /*early=*/false);
}

// The same on every rank of a shard group, as it follows from the records alone. Where a rank has failed, or a
// record has not come as the communicator is broken, none of them updates anything; all learn of the failure as
// they do of one in a late update, with the next exchange.
void RecordExchange::ConcludeNorms(int parity) {
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
