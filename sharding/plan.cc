#include "ebb/sharding/plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/decisions.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/pools.h"
#include "ebb/sharding/reduction.h"
#include "ebb/sharding/residency.h"

namespace ebb::sharding {
namespace {

// Pools are laid out for at most this many rounds: after the first, every round repeats the one
// before it.
constexpr int kPoolRoundsMax = 3;

ResidencyLimits LimitsOf(const Config& config, DType compute) {
  return {.prefetch_depth = config.zero.overlap_comm ? config.ebb.prefetch_depth : 0,
          .prefetch_elements = config.zero.prefetch_bucket_size,
          .live_elements = config.zero.max_live_parameters,
          .reuse_elements = config.zero.max_reuse_distance,
          .group_elements = GatherGroupElements(config, compute),
          .reshard_after_forward = config.ebb.reshard_after_forward};
}

// Bytes that one rank receives when `shard` elements of every rank become whole, or sends when they
// are summed.
int64_t RingBytes(int world, int64_t shard, DType dtype) {
  return (world - 1) * shard * SizeOf(dtype);
}

class Builder {
 public:
  Builder(const PlanInputs& inputs, Plan& plan, const Residency& residency,
          const Reduction& reduction)
      : inputs_(inputs),
        plan_(plan),
        d_(plan.decisions),
        residency_(residency),
        reduction_(reduction) {}

  void BuildStep() {
    Prepare();
    Begin();
    for (int s = 0; s < static_cast<int>(plan_.scopes.size()); ++s) {
      Open(s);
      Close(s);
    }
    Finish();
  }

  void BuildWalk() {
    Prepare();
    Begin();
    for (int s = 0; s < static_cast<int>(plan_.scopes.size()); ++s) {
      Open(s);
      Close(s);
    }
    NewMoment(Moment::kFinish, -1);
  }

 private:
  void Prepare() {
    const size_t scopes = plan_.scopes.size(), units = plan_.layout.units.size();
    plan_.reduce_of_scope.assign(scopes, -1);
    plan_.gather_of_scope.assign(scopes, -1);
    mark_of_scope_.assign(scopes, -1);
    gradient_reader_.assign(scopes, -1);
    last_gather_.assign(units, -1);
    gradient_final_.assign(units, -1);
    updated_.assign(units, false);
    contributions_.assign(units, 0);
    contributions_left_.assign(units, 0);
    for (const std::vector<int>& group : reduction_.groups) {
      for (int s : group) ++contributions_left_[plan_.scopes[s].unit];
    }
  }

  void NewMoment(Moment::Kind kind, int scope) {
    plan_.moments.push_back({.kind = kind, .scope = scope, .operations = {}, .compute = {}});
  }

  int Issue(Operation operation) {
    const int index = static_cast<int>(plan_.operations.size());
    plan_.operations.push_back(std::move(operation));
    plan_.moments.back().operations.push_back(index);
    return index;
  }

  void Begin() {
    NewMoment(Moment::kBegin, -1);
    last_mark_ = Issue(
        {.kind = OperationKind::kMark, .stream = StreamId::kCompute, .parts = {}, .after = {}});
    IssueGathers(/*tick=*/0);
  }

  void Open(int s) {
    NewMoment(Moment::kOpen, s);
    const PlannedScope& scope = plan_.scopes[s];
    IssueGathers(OpenTick(s));
    std::vector<Dependency>& waits = plan_.moments.back().compute;
    if (d_.kept_whole[scope.unit]) {
      waits.push_back({Dependency::kUpdated, scope.unit});
    } else {
      waits.push_back({Dependency::kOperation, plan_.gather_of_scope[s]});
    }
    if (scope.backward && d_.trainable[scope.unit]) WaitForGradientMemory(s, waits);
  }

  void Close(int s) {
    NewMoment(Moment::kClose, s);
    last_mark_ = mark_of_scope_[s] = Issue({.kind = OperationKind::kMark,
                                            .stream = StreamId::kCompute,
                                            .parts = {{plan_.scopes[s].unit, s}},
                                            .after = {}});
    const int group = reduction_.group_of_scope[s];
    if (group >= 0 && reduction_.groups[group].back() == s)
      IssueReduction(reduction_.groups[group]);
  }

  void Finish() {
    NewMoment(Moment::kFinish, -1);
    last_mark_ = Issue(
        {.kind = OperationKind::kMark, .stream = StreamId::kCompute, .parts = {}, .after = {}});
    exchange_ = Issue({.kind = OperationKind::kExchange,
                       .stream = StreamId::kReduce,
                       .parts = {},
                       .after = {{Dependency::kOperation, last_mark_}},
                       .bytes = (d_.world - 1) * kExchangeBytes});
    IssueUpdates();
    if (d_.timing == UpdateTiming::kOff) {
      for (int u = 0; u < static_cast<int>(updated_.size()); ++u) {
        if (d_.trainable[u]) plan_.moments.back().compute.push_back({Dependency::kUpdated, u});
      }
    }
  }

  // parameters
  void IssueGathers(int tick) {
    for (; next_group_ < residency_.groups.size(); ++next_group_) {
      const GatherGroup& group = residency_.groups[next_group_];
      if (group.issue != tick) return;
      Operation gather{
          .kind = OperationKind::kGather, .stream = StreamId::kGather, .parts = {}, .after = {}};
      int previous_user =
          plan_.moments.front().operations.front();  // the begin mark: all of earlier steps
      std::vector<Dependency> updates;
      for (int i : group.stays) {
        const Stay& stay = residency_.stays[i];
        const UnitLayout& unit = plan_.layout.units[stay.unit];
        gather.parts.push_back({stay.unit, stay.first});
        gather.bytes += RingBytes(d_.world, unit.shard(), d_.compute);
        previous_user = std::max(previous_user, LastUserOfSlot(stay.unit, tick));
        if (last_gather_[stay.unit] < 0 && d_.trainable[stay.unit])
          updates.push_back({Dependency::kUpdated, stay.unit});
      }
      gather.after.push_back({Dependency::kOperation, previous_user});
      gather.after.insert(gather.after.end(), updates.begin(), updates.end());
      const int index = Issue(std::move(gather));
      for (int i : group.stays) {
        const Stay& stay = residency_.stays[i];
        last_gather_[stay.unit] = index;
        for (int s = stay.first; s <= stay.last; ++s) {
          if (plan_.scopes[s].unit == stay.unit) plan_.gather_of_scope[s] = index;
        }
      }
    }
  }

  // The mark of the last scope closed before `tick` whose unit's slot overlaps this unit's. Marks
  // are in compute order, so waiting for the last one covers those before it.
  int LastUserOfSlot(int unit, int tick) const {
    for (int s = (tick - 1) / 2 - 1; s >= 0; --s) {
      const int other = plan_.scopes[s].unit;
      if (!d_.kept_whole[other] && SlotsOverlap(unit, other)) return mark_of_scope_[s];
    }
    return -1;
  }

  bool SlotsOverlap(int a, int b) const {
    const auto end = [&](int u) {
      return plan_.pools.units[u].gather_frozen +
             plan_.layout.units[u].frozen.elements * SizeOf(d_.compute);
    };
    const auto begin = [&](int u) { return plan_.pools.units[u].gather_trainable; };
    return begin(a) < end(b) && begin(b) < end(a);
  }

  // gradients
  int64_t GradientBytes(int scope) const {
    return plan_.layout.units[plan_.scopes[scope].unit].trainable.elements * SizeOf(d_.gradient);
  }

  // Before backward writes a whole gradient, whatever read that memory before has read it.
  void WaitForGradientMemory(int s, std::vector<Dependency>& waits) const {
    const int64_t begin = plan_.pools.visits[plan_.scopes[s].visit].gradient,
                  end = begin + GradientBytes(s);
    int reader = -1;
    for (int other = s - 1; other >= 0 && reader < 0; --other) {
      if (gradient_reader_[other] < 0) continue;
      const int64_t other_begin = plan_.pools.visits[plan_.scopes[other].visit].gradient;
      if (begin < other_begin + GradientBytes(other) && other_begin < end)
        reader = gradient_reader_[other];
    }
    waits.push_back(reader < 0 ? Dependency{Dependency::kExchanged, 0}
                               : Dependency{Dependency::kOperation, reader});
  }

  void IssueReduction(const std::vector<int>& group) {
    std::vector<Part> parts;
    int64_t ring_bytes = 0, cast_bytes = 0, accumulate_bytes = 0, norm_bytes = 0;
    bool accumulates = false, writes_shard = false;
    std::vector<Dependency> previous_updates;
    for (int s : group) {
      const int unit = plan_.scopes[s].unit;
      const Section& section = plan_.layout.units[unit].trainable;
      Part part{.unit = unit,
                .scope = s,
                .first = contributions_[unit]++ == 0,
                .last = --contributions_left_[unit] == 0};
      if (part.first) previous_updates.push_back({Dependency::kUpdated, unit});
      accumulates |= d_.accumulates[unit];
      writes_shard |= !d_.accumulates[unit];
      ring_bytes += RingBytes(d_.world, section.shard, d_.communication);
      cast_bytes += section.elements * (SizeOf(d_.gradient) + SizeOf(d_.communication));
      if (d_.accumulates[unit]) {
        accumulate_bytes += section.shard * (SizeOf(d_.accumulation) * (part.first ? 1 : 2) +
                                             SizeOf(d_.communication));
      } else {
        norm_bytes += section.shard * SizeOf(d_.communication);
      }
      parts.push_back(part);
    }
    std::vector<Dependency> after = {{Dependency::kOperation, mark_of_scope_[group.back()]}};
    // The previous step's update has read the shard before this step writes it.
    after.insert(after.end(), previous_updates.begin(), previous_updates.end());
    int reader = -1;
    if (d_.gradient != d_.communication) {
      reader = Issue({.kind = OperationKind::kCast,
                      .stream = StreamId::kReduce,
                      .parts = parts,
                      .after = after,
                      .bytes = cast_bytes});
      after.clear();
    }
    const int reduce = Issue({.kind = OperationKind::kReduce,
                              .stream = StreamId::kReduce,
                              .parts = parts,
                              .after = after,
                              .bytes = ring_bytes});
    const bool casts = reader >= 0;
    if (!casts) reader = reduce;
    int final_operation = reduce;
    if (accumulates) {
      std::vector<Part> folded;
      for (const Part& part : parts) {
        if (d_.accumulates[part.unit]) folded.push_back(part);
      }
      final_operation = Issue({.kind = OperationKind::kAccumulate,
                               .stream = StreamId::kReduce,
                               .parts = folded,
                               .after = {},
                               .bytes = accumulate_bytes});
      if (!casts) reader = final_operation;
    }
    if (writes_shard) {
      std::vector<Part> direct;
      for (const Part& part : parts) {
        if (!d_.accumulates[part.unit]) direct.push_back(part);
      }
      final_operation = Issue({.kind = OperationKind::kNorm,
                               .stream = StreamId::kReduce,
                               .parts = direct,
                               .after = {},
                               .bytes = norm_bytes});
    }
    for (int s : group) {
      gradient_reader_[s] = reader;
      plan_.reduce_of_scope[s] = reduce;
    }
    std::vector<int> complete;
    for (const Part& part : parts) {
      if (part.last) complete.push_back(part.unit);
    }
    if (d_.stage == 0 && d_.world > 1 && !complete.empty()) {
      Operation whole{.kind = OperationKind::kGatherGradient,
                      .stream = StreamId::kReduce,
                      .parts = {},
                      .after = {}};
      for (int unit : complete) {
        whole.parts.push_back({.unit = unit});
        whole.bytes +=
            RingBytes(d_.world, plan_.layout.units[unit].trainable.shard, d_.accumulation);
      }
      final_operation = Issue(std::move(whole));
    }
    for (int unit : complete) {
      gradient_final_[unit] = final_operation;
      if (d_.timing == UpdateTiming::kEarly) IssueUpdate(unit);
    }
  }

  // updates
  int64_t UpdateBytes(int unit) const {
    const Section& section = plan_.layout.units[unit].trainable;
    const int64_t elements = d_.stage == 0 ? section.elements : section.shard;
    const int64_t states = 8 * (1 + d_.optimizer_states) + SizeOf(d_.shard_dtype(unit));
    return elements * (states + (d_.compute == DType::kFloat32 ? 0 : SizeOf(d_.compute)));
  }

  void IssueUpdate(int unit) {
    std::vector<Dependency> after;
    if (gradient_final_[unit] >= 0)
      after.push_back({Dependency::kOperation, gradient_final_[unit]});
    if (d_.timing != UpdateTiming::kEarly) after.push_back({Dependency::kOperation, exchange_});
    // The last gather has read the slice that the update writes.
    if (last_gather_[unit] >= 0) after.push_back({Dependency::kOperation, last_gather_[unit]});
    last_update_ = Issue({.kind = OperationKind::kUpdate,
                          .stream = StreamId::kUpdate,
                          .parts = {{.unit = unit}},
                          .after = std::move(after),
                          .bytes = UpdateBytes(unit)});
    updated_[unit] = true;
    update_of_unit_.resize(updated_.size(), -1);
    update_of_unit_[unit] = last_update_;
  }

  // Units in the order in which the next forward needs them; a group of refreshes follows the last
  // update it needs.
  void IssueUpdates() {
    const int64_t limit = GatherGroupElements(*inputs_.config, d_.compute);
    Operation refresh{
        .kind = OperationKind::kRefresh, .stream = StreamId::kGather, .parts = {}, .after = {}};
    int64_t grouped = 0;
    const auto flush = [&] {
      if (refresh.parts.empty()) return;
      Issue(std::move(refresh));
      refresh = {
          .kind = OperationKind::kRefresh, .stream = StreamId::kGather, .parts = {}, .after = {}};
      grouped = 0;
    };
    std::vector<bool> seen(updated_.size(), false);
    for (const Visit& visit : inputs_.model->forward) {
      const int unit = static_cast<int>(visit.unit);
      if (seen[unit] || !d_.trainable[unit]) continue;
      seen[unit] = true;
      const Section& section = plan_.layout.units[unit].trainable;
      const bool refreshes = d_.kept_whole[unit] && d_.stage > 0 && d_.world > 1;
      if (refreshes && grouped > 0 && grouped + section.elements > limit) flush();
      if (!updated_[unit]) IssueUpdate(unit);
      if (!refreshes) continue;
      refresh.parts.push_back({.unit = unit});
      refresh.after.push_back({Dependency::kOperation, update_of_unit_[unit]});
      refresh.bytes += RingBytes(d_.world, section.shard, d_.compute);
      grouped += section.elements;
    }
    flush();
  }

  const PlanInputs& inputs_;
  Plan& plan_;
  const Decisions& d_;
  const Residency& residency_;
  const Reduction& reduction_;
  size_t next_group_ = 0;  // of gathers, not issued yet
  int last_mark_ = -1, exchange_ = -1, last_update_ = -1;
  std::vector<int> mark_of_scope_, gradient_reader_;
  std::vector<int> last_gather_, gradient_final_, update_of_unit_;  // by unit
  std::vector<int> contributions_, contributions_left_;             // by unit
  std::vector<bool> updated_;
};

std::vector<int64_t> UnitElements(const ModelLayout& layout) {
  std::vector<int64_t> elements;
  for (const UnitLayout& unit : layout.units) elements.push_back(unit.elements());
  return elements;
}

absl::StatusOr<Plan> Build(const PlanInputs& inputs, int rounds, bool hold_updates, bool walk) {
  const ModelSpec& model = *inputs.model;
  const Config& config = *inputs.config;
  Plan plan;
  EBB_ASSIGN_OR_RETURN(plan.layout, LayOut(model, inputs.world));
  EBB_ASSIGN_OR_RETURN(plan.decisions, Decide(inputs, plan.layout, rounds, hold_updates));
  for (const UnitSpec& unit : model.units) plan.unit_names.push_back(unit.name);
  const Decisions& d = plan.decisions;
  const std::vector<int64_t> elements = UnitElements(plan.layout);
  const ResidencyLimits limits = LimitsOf(config, d.compute);
  const int visits = static_cast<int>(model.forward.size());

  // Addresses come from the config's own step, so that every variant of it has the same.
  Decisions configured = d;
  configured.rounds = static_cast<int>(std::min<int64_t>(
      config.gradient_accumulation_steps / config.ebb.micro_batches_per_round, kPoolRoundsMax));
  const std::vector<PlannedScope> pool_scopes = ScopesOfStep(model, configured.rounds);
  const Residency pool_residency = PlanResidency(pool_scopes, elements, d.kept_whole, limits);
  const Reduction pool_reduction =
      PlanReduction(pool_scopes, plan.layout, configured, visits, ReduceGroupBytes(config));
  plan.pools = LayOutPools({.model = &model,
                            .layout = &plan.layout,
                            .decisions = &d,
                            .scopes = &pool_scopes,
                            .residency = &pool_residency,
                            .reduction = &pool_reduction,
                            .micro_batches = config.gradient_accumulation_steps});

  plan.scopes = walk ? ScopesOfWalk(model) : ScopesOfStep(model, d.rounds);
  const Residency residency = PlanResidency(plan.scopes, elements, d.kept_whole, limits);
  const Reduction reduction =
      PlanReduction(plan.scopes, plan.layout, d, visits, ReduceGroupBytes(config));
  Builder builder(inputs, plan, residency, reduction);
  walk ? builder.BuildWalk() : builder.BuildStep();
  plan.hash = Fingerprint(plan);
  return plan;
}

}  // namespace

absl::StatusOr<Plan> PlanStep(const PlanInputs& inputs, int rounds, bool hold_updates) {
  return Build(inputs, rounds, hold_updates, /*walk=*/false);
}

absl::StatusOr<Plan> PlanWalk(const PlanInputs& inputs) {
  return Build(inputs, 1, /*hold_updates=*/true, /*walk=*/true);
}

int64_t Plan::BytesOf(OperationKind kind) const {
  int64_t bytes = 0;
  for (const Operation& operation : operations) {
    if (operation.kind == kind) bytes += operation.bytes;
  }
  return bytes;
}

std::string_view Name(OperationKind kind) {
  switch (kind) {
    case OperationKind::kMark:
      return "mark";
    case OperationKind::kGather:
      return "gather";
    case OperationKind::kCast:
      return "cast";
    case OperationKind::kReduce:
      return "reduce";
    case OperationKind::kAccumulate:
      return "accumulate";
    case OperationKind::kNorm:
      return "norm";
    case OperationKind::kGatherGradient:
      return "gather gradient";
    case OperationKind::kExchange:
      return "exchange";
    case OperationKind::kUpdate:
      return "update";
    case OperationKind::kRefresh:
      return "refresh";
  }
  return "";
}

std::string_view Name(StreamId stream) {
  constexpr std::string_view kNames[kStreams] = {"compute", "gather", "reduce", "update"};
  return kNames[static_cast<int>(stream)];
}

std::string_view Name(UpdateTiming timing) {
  switch (timing) {
    case UpdateTiming::kEarly:
      return "early";
    case UpdateTiming::kLate:
      return "late";
    case UpdateTiming::kOff:
      return "off";
  }
  return "";
}

}  // namespace ebb::sharding
