#include "ebb/sharding/fingerprint.h"

#include <optional>
#include <ranges>
#include <string>
#include <type_traits>

namespace ebb::sharding {
namespace {

// Each structure is taken apart whole: a field that is added to one does not compile until it is
// hashed here, or said to be left out. Lists are hashed with their lengths.
class Fields {
 public:
  template <class... Values>
  Fields& Add(const Values&... values) {
    (One(values), ...);
    return *this;
  }
  uint64_t hash() const { return hasher_.hash(); }

 private:
  template <class Value>
  requires(std::is_integral_v<Value> || std::is_enum_v<Value>) void One(Value value) {
    for (size_t byte = 0; byte < sizeof(Value); ++byte)
      hasher_.Mix(static_cast<unsigned char>(static_cast<uint64_t>(value) >> (8 * byte)));
  }
  void One(const std::string& text) { hasher_.Add(std::string_view(text)); }
  template <class Value>
  void One(const std::optional<Value>& value) {
    One(value.has_value());
    if (value) One(*value);
  }
  template <std::ranges::sized_range List>
  void One(const List& list) {
    hasher_.Add(static_cast<int64_t>(std::ranges::size(list)));
    for (const auto& each : list) One(each);
  }

  void One(const Split& split) {
    const auto& [dimension, parts, multiple, sizes] = split;
    Add(dimension, parts, multiple, sizes);
  }
  // But for what tensor ranks have each of its own.
  void One(const Block& block) {
    const auto& [rank, ranks, whole_shape, shape] = block;
    Add(ranks, whole_shape);
  }
  void One(const ParameterSpec& parameter) {
    const auto& [name, shape, init, trainable, group, cut_rows, compute, matrix_update, matrix_rows,
                 over_tensor, split, sums_gradient, block] = parameter;
    Add(name, shape, trainable, group, cut_rows, compute, matrix_update, matrix_rows, over_tensor,
        split, sums_gradient, block);
  }
  void One(const UnitSpec& unit) {
    const auto& [name, parameters, keep_whole, parts, state_block, has_matrices] = unit;
    Add(name, parameters, keep_whole, parts, state_block, has_matrices);
  }
  void One(const Visit& visit) {
    const auto& [unit, output_bytes, forward, backward, gradients, of_part, forward_tensor_bytes,
                 backward_tensor_bytes] = visit;
    Add(unit, output_bytes, forward, backward, gradients, of_part, forward_tensor_bytes,
        backward_tensor_bytes);
  }
  void One(const ScopeEvent& event) {
    const auto& [opens, backward, recompute, visit] = event;
    Add(opens, backward, recompute, visit);
  }

  void One(const PlacedParameter& placement) {
    const auto& [parameter, offset, elements] = placement;
    Add(parameter, offset, elements);
  }
  void One(const Section& section) {
    const auto& [placements, shard, elements] = section;
    Add(placements, shard, elements);
  }
  void One(const UnitLayout& unit) {
    const auto& [trainable, frozen] = unit;
    Add(trainable, frozen);
  }
  void One(const ParameterLocation& parameter) {
    const auto& [unit, trainable, offset, elements] = parameter;
    Add(unit, trainable, offset, elements);
  }
  void One(const ModelLayout& layout) {
    const auto& [shards, units, parameters] = layout;
    Add(shards, units, parameters);
  }

  void One(const Place& place) {
    const auto& [tier, pool, of_secondary, row, offset, per_slice] = place;
    Add(tier, pool, of_secondary, row, offset, per_slice);
  }
  void One(const Encoding& encoding) {
    const auto& [dtype, map, block] = encoding;
    Add(dtype, map, block);
  }
  void One(const OwnedMatrix& matrix) {
    const auto& [parameter, begin, rows, columns, owner, at] = matrix;
    Add(parameter, begin, rows, columns, owner, at);
  }
  void One(const SubGroup& group) {
    const auto& [unit, begin, end, tier] = group;
    Add(unit, begin, end, tier);
  }
  void One(const Extent& extent) {
    const auto& [begin, end, place] = extent;
    Add(begin, end, place);
  }
  void One(const Array& row) {
    const auto& [purpose, of, trainable, state, encoding, spread, elements, same_as, behind, shares,
                 turns, turn_bytes, first_extent, extents, first_lifetime, lifetimes] = row;
    Add(purpose, of, trainable, state, encoding, spread, elements, same_as, behind, shares, turns,
        turn_bytes, first_extent, extents, first_lifetime, lifetimes);
  }
  // But for lifetimes, which have become places.
  void One(const Table& table) {
    Add(table.units, table.visits, table.states, table.slices, table.secondary_slices,
        table.updates_whole, table.rows, table.extents, table.sub_groups, table.first_sub_groups);
    for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) One(table.bytes.On(tier));
  }

  // But for the text of timing_reason.
  void One(const Decisions& decisions) {
    const auto& [world, shards, secondary_shards, stage, rounds, micro_batches_per_round, compute,
                 communication, accumulation, own_compute, reduce_at_round, keeps_step_gradients,
                 sums_before_reducing, gradient, sums_in_scratch, tensor_sums_in_scratch,
                 optimizer_states, matrices, direction, iteration_steps, state_encodings,
                 state_blocks, own_optimizer, takes_norms, norm_states, sets_without_norms,
                 parameter_tier, optimizer_tier, gradient_tier, activation_tier, gradients_follow,
                 split_master, stochastic_rounding, timing, timing_reason, holds, carried,
                 shares_reads, kept_whole, accumulates, trainable, verdict_ranks, compared,
                 has_blocks, sums_tensor] = decisions;
    Add(world, shards, secondary_shards, stage, rounds, micro_batches_per_round, compute,
        communication, accumulation, own_compute, reduce_at_round, keeps_step_gradients,
        sums_before_reducing, gradient, sums_in_scratch, tensor_sums_in_scratch, optimizer_states,
        matrices, direction, iteration_steps, state_encodings, state_blocks, own_optimizer);
    Add(takes_norms, norm_states, sets_without_norms, parameter_tier, optimizer_tier, gradient_tier,
        activation_tier, gradients_follow, split_master, stochastic_rounding, timing, holds,
        carried, shares_reads, kept_whole, accumulates, trainable, verdict_ranks, compared,
        has_blocks, sums_tensor);
  }
  void One(const PlannedScope& scope) {
    const auto& [backward, recompute, round, visit, unit, open_tick, close_tick, gradients, input,
                 hands_on, input_gradient, is_reduced, releases] = scope;
    Add(backward, recompute, round, visit, unit, open_tick, close_tick, gradients, input, hands_on,
        input_gradient, is_reduced, releases);
  }

  void One(const Part& part) {
    const auto& [unit, scope, first, last] = part;
    Add(unit, scope, first, last);
  }
  void One(const Operand& operand) {
    const auto& [place, encoding, access, content, count] = operand;
    Add(place, encoding, access, content, count);
  }
  void One(const UpdateDetail& update) {
    const auto& [sub_group, begin, end, states, early, keeps_parameter, per_slice, rounding_unit] =
        update;
    Add(sub_group, begin, end, states, early, keeps_parameter, per_slice, rounding_unit);
  }
  void One(const Op& op) {
    const auto& [role, stream, starts, ends, when, by_parity, divides, goes_on, via, scope, number,
                 bytes, parts, operands, updates] = op;
    Add(role, stream, starts, ends, when, by_parity, divides, goes_on, via, scope, number, bytes,
        parts, operands, updates);
  }
  void One(const Moment& moment) {
    const auto& [kind, scope, begin, end, kernels] = moment;
    Add(kind, scope, begin, end, kernels);
  }

  Hasher hasher_;
};

}  // namespace

uint64_t Fingerprint(const ParameterSpec& parameter) {
  return Fields().Add(parameter).hash();
}

uint64_t Fingerprint(const ModelSpec& model) {
  const auto& [parameters, units, forward, order, workspace_bytes, workspace_untouched_bytes,
               compute_dtypes, gradient_dtypes] = model;
  return Fields()
      .Add(parameters, units, forward, order, workspace_bytes, workspace_untouched_bytes)
      .hash();
}

uint64_t Fingerprint(const Plan& plan) {
  const auto& [decisions, step_rounds, layout, table, scopes, ops, memory, moments, gather_of_scope,
               carries_updates, unit_names] = plan;
  return Fields()
      .Add(decisions, step_rounds, layout, table, scopes, ops, moments, gather_of_scope,
           carries_updates, unit_names)
      .hash();
}

}  // namespace ebb::sharding
