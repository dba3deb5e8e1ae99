// The exchange between ranks, part by part.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/norm_records.h"
#include "replay.h"

namespace ebb::sharding {

bool Replay::is_walk() const {
  return std::none_of(plan_->scopes.begin(), plan_->scopes.end(),
                      [](const PlannedScope& scope) { return scope.backward; });
}

// Shards of gradients are read to name non-finite parameters.
void Replay::Seal(int thing, const Op& operation) {
  const Decisions& d = plan_->decisions;
  if (!order_.Before(last_kernels_, thing)) Fail("the record may leave out kernels' losses");
  for (int norm : norms_) {
    if (!order_.Before(norm, thing))
      Fail(absl::StrCat("the record may leave out the norm of ", names_[norm]));
  }
  const bool reads = !is_walk() && d.timing != UpdateTiming::kEarly,
             gathered = d.stage == 0 && d.world > 1;
  constexpr size_t kShards = 3;
  if (operation.operands.size() != kShards + (reads ? d.trainable.size() : 0))
    Fail("the record reads other shards than there are");
  for (size_t k = kShards; k < operation.operands.size(); ++k) {
    const int unit = static_cast<int>(k - kShards);
    if (!d.trainable[unit] || GradientTier(unit) == Tier::kNvme) continue;
    const Range shard = GradientShard(unit, /*whole=*/false);
    memory_.Read(
        thing, shard,
        gathered ? Content{Content::kGatheredGradient, unit, steps_, 0, rank_ * shard.bytes}
                 : Content{Content::kGradientShard, unit, steps_, expected_contributions(unit)});
  }
  memory_.Write(thing, Control(is_walk() ? cells().walk_record() : cells().record()),
                {Content::kExchanged, steps_});
}

void Replay::Pass(int thing, std::span<const Operand> operands, Content::Kind kind) {
  if (operands.empty() || operands.size() % 2 != 0)
    return Fail("what passes has no source or no destination");
  const auto range = [&](const Operand& operand) {
    return operand.place.pool == StateClass::kControl ? Control(operand.place.offset)
                                                      : RangeOf(operand.place, operand.bytes());
  };
  int64_t read = 0, written = 0;  // bytes; parts lie side by side
  for (size_t k = 0; k < operands.size(); k += 2) {
    memory_.Read(thing, range(operands[k]), {kind, steps_, 0, 0, read});
    memory_.Write(thing, range(operands[k + 1]), {kind, steps_, 0, 0, written});
    read += operands[k].bytes();
    written += operands[k + 1].bytes();
  }
}

void Replay::CopyControl(int thing, std::span<const Operand> operands) {
  Content::Kind kind = Content::kExchanged;
  for (const Operand& operand : operands) {
    if (operand.place.pool != StateClass::kControl) continue;
    const int64_t cell = operand.place.offset;
    if (cell == cells().norm_sums()) kind = Content::kParameterNorms;
    if (cell == cells().norm_record() || cell == cells().norm_records())
      kind = Content::kNormRecords;
  }
  Pass(thing, operands, kind);
}

void Replay::SealNorms(int thing) {
  const Decisions& d = plan_->decisions;
  for (size_t g = 0; g < norms_taken_.size(); ++g) {
    if (d.norm_states[table().sub_groups[g].unit] < 0) {
      if (norms_taken_[g] >= 0) Fail("norms of parameters that need none");
    } else if (norms_taken_[g] < 0 || !order_.Before(norms_taken_[g], thing)) {
      Fail(absl::StrCat("the exchange may leave out the norms of sub-group ", g));
    }
  }
  for (const bool on_host : {false, true}) {
    if (norms_begun_[on_host])
      memory_.Read(thing, on_host ? NormSums(on_host) : Control(cells().norm_sums()),
                   {Content::kParameterNorms, steps_});
  }
  memory_.Write(thing, Control(cells().norm_record()), {Content::kNormRecords, steps_});
}

void Replay::ConcludeNorms(int thing) {
  const bool exchanged = LayOutNormRecords(plan_->layout, plan_->decisions).exchanged();
  memory_.Read(thing, Control(exchanged ? cells().norm_records() : cells().norm_record()),
               {Content::kNormRecords, steps_});
  memory_.Write(thing, Control(cells().constants()), {Content::kExchanged, steps_});
  norms_exchanged_ = thing;
}

}  // namespace ebb::sharding
