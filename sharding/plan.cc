#include "ebb/sharding/plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/fit/advice.h"
#include "ebb/sharding/fit/budget.h"
#include "ebb/sharding/lower/emit.h"
#include "ebb/sharding/lower/op_writer.h"
#include "ebb/sharding/passes/rows.h"

namespace ebb::sharding {

namespace {

ResidencyLimits LimitsOf(const Config& config, const ModelLayout& layout, const Decisions& d) {
  const bool reads = config.parameter_tier() == Tier::kNvme;
  return {.prefetch_depth = config.zero.overlap_comm ? config.ebb.prefetch_depth : 0,
          .prefetch_elements = config.zero.prefetch_bucket_size,
          .live_elements = config.zero.max_live_parameters,
          .reuse_elements = config.zero.max_reuse_distance,
          .group_elements = GatherGroupElements(config, d.compute),
          .slot_elements = reads ? SlotElements(layout, d) : std::vector<int64_t>(),
          .slot_elements_max = SlotElementsMax(config, layout, d),
          .reshard_after_forward = config.ebb.reshard_after_forward,
          .has_secondary = d.has_secondary()};
}

std::vector<int64_t> UnitElements(const ModelLayout& layout) {
  std::vector<int64_t> elements;
  for (const UnitLayout& unit : layout.units) elements.push_back(unit.elements());
  return elements;
}

// Choices that are made before anything has an address.
struct Basis {
  ModelLayout layout;
  Decisions decisions;
  std::vector<int64_t> elements;  // of each unit
  ResidencyLimits limits;
};

absl::StatusOr<Basis> DecideBasis(const PlanInputs& inputs, int rounds, bool hold_updates) {
  const Config& config = *inputs.config;
  Basis base;
  const int group = static_cast<int>(config.ebb.shard_group);
  EBB_ASSIGN_OR_RETURN(base.layout, LayOut(*inputs.model, group > 0 ? group : inputs.world));
  EBB_ASSIGN_OR_RETURN(base.decisions, Decide(inputs, base.layout, rounds, hold_updates));
  base.elements = UnitElements(base.layout);
  base.limits = LimitsOf(config, base.layout, base.decisions);
  return base;
}

int RoundsOf(const Config& config) {
  return static_cast<int>(config.gradient_accumulation_steps / config.ebb.micro_batches_per_round);
}

// Addresses come from the config's own step, so that every variant of it has the same.
enum class Fill {
  kAll,       // with what fills the host
  kUnfilled,  // what host memory has left is left
  kLeast      // LeastTable
};

absl::StatusOr<Table> TableOf(const Basis& base, const PlanInputs& inputs, Fill fill) {
  const ModelSpec& model = *inputs.model;
  const Config& config = *inputs.config;
  Decisions configured = base.decisions;
  configured.rounds = std::min(RoundsOf(config), kPlannedRounds);
  const std::vector<PlannedScope> scopes = ScopesOfStep(model, configured.rounds);
  const Residency residency =
      PlanResidency(scopes, base.elements, base.decisions.kept_whole, base.limits);
  // A walk gathers otherwise than the beginning of a step: other scopes follow each other, or all
  // gathers are over all ranks, so that others come in groups.
  const bool has_own_walk = !model.order.empty() || base.decisions.has_secondary();
  Residency walk;
  if (has_own_walk) {
    ResidencyLimits limits = base.limits;
    limits.has_secondary = false;
    walk = PlanResidency(ScopesOfWalk(model), base.elements, base.decisions.kept_whole, limits);
  }
  const Reduction reduction =
      PlanReduction(scopes, base.layout, configured, static_cast<int>(model.forward.size()),
                    ReduceGroupBytes(config));
  const RowInputs wanted{.model = &model,
                         .layout = &base.layout,
                         .decisions = &base.decisions,
                         .placement = inputs.placement,
                         .scopes = &scopes,
                         .residency = &residency,
                         .walk = has_own_walk ? &walk : nullptr,
                         .reduction = &reduction,
                         .micro_batches = config.ebb.micro_batches_per_round,
                         .fills_host = fill == Fill::kAll};
  if (fill == Fill::kLeast) return LeastTable(wanted, config);
  return LayOutNearBudget(wanted, config);
}

absl::Status Check(const PoolBytes& pools, const PlanInputs& inputs) {
  using CapError = PlanInputs::CapError;
  const absl::Status status =
      CheckBudget(pools, *inputs.config, /*names_classes=*/inputs.cap_error != CapError::kNeed);
  if (status.ok() || inputs.cap_error != CapError::kAdvice) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), "; ",
                                                  FindAdvice(inputs, CapsOf(*inputs.config)).text));
}

absl::StatusOr<Plan> Build(const PlanInputs& inputs, int rounds, bool hold_updates, PlanKind kind) {
  const ModelSpec& model = *inputs.model;
  const Config& config = *inputs.config;
  EBB_ASSIGN_OR_RETURN(Basis base, DecideBasis(inputs, rounds, hold_updates));
  Plan plan;
  plan.step_rounds = rounds;
  EBB_ASSIGN_OR_RETURN(plan.table, TableOf(base, inputs, Fill::kAll));
  EBB_RETURN_IF_ERROR(Check(plan.table.bytes, inputs));
  plan.layout = std::move(base.layout);
  plan.decisions = std::move(base.decisions);
  for (const UnitSpec& unit : model.units) plan.unit_names.push_back(unit.name);
  const Decisions& d = plan.decisions;
  const int visits = static_cast<int>(model.forward.size());

  if (kind != PlanKind::kDrain)
    plan.scopes = kind == PlanKind::kWalk ? ScopesOfWalk(model) : ScopesOfStep(model, d.rounds);
  // Evaluations come when they like, and leave to steps what those have filled.
  if (kind == PlanKind::kWalk) base.limits.has_secondary = false;
  const Residency residency = PlanResidency(plan.scopes, base.elements, d.kept_whole, base.limits);
  MarkReleases(residency, plan.scopes);
  const Reduction reduction =
      PlanReduction(plan.scopes, plan.layout, d, visits, ReduceGroupBytes(config));
  for (size_t s = 0; s < plan.scopes.size(); ++s)
    plan.scopes[s].is_reduced = reduction.group_of_scope[s] >= 0;
  const PassInputs in{.kind = kind,
                      .model = model,
                      .plan = plan,
                      .residency = residency,
                      .reduction = reduction,
                      .group_elements = base.limits.group_elements};
  Emit(in, PlanSwapIns(in)).Finish(plan);
  return plan;
}

}  // namespace

absl::StatusOr<Plan> PlanStep(const PlanInputs& inputs, int rounds, bool hold_updates) {
  const int of_step = rounds == 0 ? RoundsOf(*inputs.config) : rounds;
  EBB_ASSIGN_OR_RETURN(
      Plan plan, Build(inputs, std::min(of_step, kPlannedRounds), hold_updates, PlanKind::kStep));
  plan.step_rounds = of_step;
  return plan;
}

absl::StatusOr<Plan> PlanUnrolledStep(const PlanInputs& inputs, int rounds, bool hold_updates) {
  return Build(inputs, rounds, hold_updates, PlanKind::kStep);
}

absl::StatusOr<Table> PlanTable(const PlanInputs& inputs) {
  EBB_ASSIGN_OR_RETURN(const Basis base, DecideBasis(inputs, /*rounds=*/0, /*hold_updates=*/false));
  return TableOf(base, inputs, Fill::kUnfilled);
}

absl::StatusOr<Table> PlanLeastTable(const PlanInputs& inputs) {
  EBB_ASSIGN_OR_RETURN(const Basis base, DecideBasis(inputs, /*rounds=*/0, /*hold_updates=*/false));
  return TableOf(base, inputs, Fill::kLeast);
}

FoundAdvice FindAdvice(const PlanInputs& inputs, const MemoryCaps& caps) {
  const auto with = [&](const Config& changed) {
    PlanInputs other = inputs;
    other.config = &changed;
    return other;
  };
  return FindAdvice(
      *inputs.config, caps,
      {.lay_out = [&](const Config& changed) { return PlanTable(with(changed)); },
       .lay_out_least = [&](const Config& changed) { return PlanLeastTable(with(changed)); },
       .sums_depend_on_groups = inputs.sums_depend_on_groups});
}

absl::StatusOr<Plan> PlanWalk(const PlanInputs& inputs) {
  return Build(inputs, 1, /*hold_updates=*/true, PlanKind::kWalk);
}

absl::StatusOr<Plan> PlanDrain(const PlanInputs& inputs) {
  return Build(inputs, std::min(RoundsOf(*inputs.config), kPlannedRounds), /*hold_updates=*/true,
               PlanKind::kDrain);
}

int64_t Plan::OwnBytes() const {
  const auto held = [](const auto& list) { return list.capacity() * sizeof(list.front()); };
  return static_cast<int64_t>(held(ops) + held(moments) + held(scopes) + held(gather_of_scope)) +
         memory->bytes();
}

std::span<const Op> Plan::MiddleRound() const {
  if (decisions.rounds != kPlannedRounds || scopes.empty()) return {};
  const size_t ticks = 2 * scopes.size() / kPlannedRounds;
  const auto begin = static_cast<size_t>(moments[1 + ticks].begin),
             end = static_cast<size_t>(moments[1 + 2 * ticks].begin);
  return std::span(ops).subspan(begin, end - begin);
}

int64_t Plan::BytesOf(Role role, int rounds) const {
  const auto sum = [role](std::span<const Op> of) {
    int64_t bytes = 0;
    for (const Op& op : of) bytes += op.role == role ? op.bytes : 0;
    return bytes;
  };
  const int again = (rounds == 0 ? step_rounds : rounds) - decisions.rounds;
  return sum(ops) + again * sum(MiddleRound());
}

int64_t Plan::Shown() const {
  return std::count_if(ops.begin(), ops.end(), [](const Op& op) { return op.number >= 0; });
}

OpList ListOf(const Plan& plan, bool carrying) {
  OpList list{.again = plan.step_rounds - plan.decisions.rounds, .memory = plan.memory};
  list.ops.reserve(plan.ops.size());
  int round = 0;
  for (Moment moment : plan.moments) {
    if (moment.kind == Moment::kOpen && plan.decisions.rounds == kPlannedRounds &&
        plan.scopes[moment.scope].round > round) {
      ++round;
      list.round_begins.push_back(list.size());
    }
    const int begin = list.size();
    for (int index = moment.begin; index < moment.end; ++index) {
      const Op& op = plan.ops[index];
      const bool runs = op.runs(carrying);
      if (op.number >= 0) list.index_of.push_back(runs ? list.size() : -1);
      if (runs) list.ops.push_back(op);
    }
    moment.begin = begin;
    moment.end = list.size();
    if (moment.kernels >= 0) moment.kernels = moment.end - 1;
    list.moments.push_back(moment);
  }
  return list;
}

}  // namespace ebb::sharding
