// Hashes that ranks compare before they train together change with each thing that could differ.
#include "ebb/sharding/fingerprint.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "unit_chain.h"

namespace ebb::sharding::fingerprint_test {
namespace {

Plan SomePlan() {
  const ModelSpec model = UnitChain({4'096, 4'096, 4'096}, /*output_bytes=*/512);
  Config config;
  config.gradient_accumulation_steps = 1;
  config.compute = DType::kBFloat16;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  return *PlanStep({.model = &model, .config = &config, .world = 2, .optimizer_states = 2});
}

// A change of one field of a plan.
struct PlanChange {
  const char* what;
  void (*change)(Plan& plan);
};
// An operation with another list of what it has, which lives as long as the program.
template <class T>
void ChangeFirst(std::span<const T> Op::*list, Plan& plan, void (*change)(T& first)) {
  static std::vector<std::vector<T>> kept;
  for (Op& op : plan.ops) {
    if ((op.*list).empty()) continue;
    std::vector<T>& changed = kept.emplace_back((op.*list).begin(), (op.*list).end());
    change(changed.front());
    op.*list = changed;
    return;
  }
}
void ChangeOperand(Plan& plan, void (*change)(Operand& operand)) {
  ChangeFirst<Operand>(&Op::operands, plan, change);
}
void ChangeUpdate(Plan& plan, void (*change)(UpdateDetail& update)) {
  ChangeFirst<UpdateDetail>(&Op::updates, plan, change);
}
void ChangePart(Plan& plan, void (*change)(Part& part)) {
  ChangeFirst<Part>(&Op::parts, plan, change);
}

const PlanChange kPlanChanges[] = {
    {"nothing", [](Plan&) {}},
    {"rounds of the step", [](Plan& plan) { plan.step_rounds += 1; }},
    {"a decision", [](Plan& plan) { plan.decisions.split_master ^= true; }},
    {"a list of decisions", [](Plan& plan) { plan.decisions.kept_whole.push_back(false); }},
    {"a section", [](Plan& plan) { plan.layout.units[0].frozen.shard += 64; }},
    {"a parameter's place", [](Plan& plan) { plan.layout.parameters[1].offset += 64; }},
    {"a unit's name", [](Plan& plan) { plan.unit_names[0] += "s"; }},
    {"the place of an array", [](Plan& plan) { plan.table.extents.back().place.offset += 8; }},
    {"elements of an array", [](Plan& plan) { plan.table.rows[1].elements += 8; }},
    {"another name of an array", [](Plan& plan) { plan.table.rows[1].same_as = 0; }},
    {"bytes between micro-batches", [](Plan& plan) { plan.table.rows.back().turn_bytes += 8; }},
    {"turns of a ring", [](Plan& plan) { plan.table.rows.back().turns += 1; }},
    {"one array fewer", [](Plan& plan) { plan.table.rows.pop_back(); }},
    {"bytes of a pool",
     [](Plan& plan) { plan.table.bytes.Of(Tier::kCpu, StateClass::kGradient) += 8; }},
    {"a tier", [](Plan& plan) { plan.table.sub_groups[0].tier = Tier::kCpu; }},
    {"sub-groups of a unit", [](Plan& plan) { plan.table.first_sub_groups.back() += 1; }},
    {"a tick", [](Plan& plan) { plan.scopes[1].close_tick += 1; }},
    {"a scope without a reduction", [](Plan& plan) { plan.scopes.back().is_reduced ^= true; }},
    {"the gather of a scope", [](Plan& plan) { plan.gather_of_scope[0] += 1; }},
    {"the moment of an operation",
     [](Plan& plan) {
       --plan.moments[0].end;
       --plan.moments[1].begin;
     }},
    {"a stream", [](Plan& plan) { plan.ops[0].stream = StreamId::kUpload; }},
    {"a condition", [](Plan& plan) { plan.ops[0].when = When::kCarrying; }},
    {"bytes of an operation", [](Plan& plan) { plan.ops[0].bytes += 8; }},
    {"one operand fewer",
     [](Plan& plan) {
       std::span<const Operand>& operands = plan.ops.back().operands;
       operands = operands.first(operands.size() - 1);
     }},
    // Another dtype of as many bytes.
    {"a dtype",
     [](Plan& plan) {
       ChangeOperand(plan, [](Operand& operand) { operand.encoding = DType::kFloat16; });
     }},
    {"a count", [](Plan& plan) { ChangeOperand(plan, [](Operand& operand) { ++operand.count; }); }},
    {"an access",
     [](Plan& plan) {
       ChangeOperand(plan, [](Operand& operand) {
         operand.access = Writes(operand.access) ? Access::kRead : Access::kReadWrite;
       });
     }},
    {"an offset",
     [](Plan& plan) { ChangeOperand(plan, [](Operand& operand) { ++operand.place.offset; }); }},
    {"bytes between slices",
     [](Plan& plan) { ChangeOperand(plan, [](Operand& operand) { ++operand.place.per_slice; }); }},
    {"an early update",
     [](Plan& plan) { ChangeUpdate(plan, [](UpdateDetail& update) { update.early ^= true; }); }},
    {"a parameter that is kept",
     [](Plan& plan) {
       ChangeUpdate(plan, [](UpdateDetail& update) { update.keeps_parameter ^= true; });
     }},
    {"the elements of a rounding",
     [](Plan& plan) { ChangeUpdate(plan, [](UpdateDetail& update) { ++update.per_slice; }); }},
    {"the bits of a rounding",
     [](Plan& plan) { ChangeUpdate(plan, [](UpdateDetail& update) { ++update.rounding_unit; }); }},
    {"the states of an update",
     [](Plan& plan) { ChangeUpdate(plan, [](UpdateDetail& update) { ++update.states; }); }},
    {"the first contribution",
     [](Plan& plan) { ChangePart(plan, [](Part& part) { part.first ^= true; }); }},
};

TEST(Fingerprint, OfAPlanChangesWithAnyOfWhatItSays) {
  std::set<uint64_t> seen;
  for (const PlanChange& each : kPlanChanges) {
    Plan plan = SomePlan();
    each.change(plan);
    EXPECT_TRUE(seen.insert(Fingerprint(plan)).second) << each.what;
  }
}

// A change of one operation, or of one moment.
struct OpChange {
  const char* what;
  void (*change)(Op& op, Moment& moment);
};
const OpChange kOpChanges[] = {
    {"nothing", [](Op&, Moment&) {}},
    {"role", [](Op& of, Moment&) { of.role = Role::kCastMasters; }},
    {"stream", [](Op& of, Moment&) { of.stream = StreamId::kUpload; }},
    {"start", [](Op& of, Moment&) { of.starts = kWritten; }},
    {"end", [](Op& of, Moment&) { of.ends = kWritten; }},
    {"carried", [](Op& of, Moment&) { of.when = When::kCarrying; }},
    {"parity", [](Op& of, Moment&) { of.by_parity ^= true; }},
    {"divides", [](Op& of, Moment&) { of.divides ^= true; }},
    {"via", [](Op& of, Moment&) { of.via = DType::kFloat32; }},
    {"scope", [](Op& of, Moment&) { of.scope += 1; }},
    {"goes on", [](Op& of, Moment&) { of.goes_on ^= true; }},
    {"number", [](Op& of, Moment&) { of.number += 1; }},
    {"bytes", [](Op& of, Moment&) { of.bytes += 1; }},
    {"operands", [](Op& of, Moment&) { of.operands = {}; }},
    {"kernels", [](Op&, Moment& moment) { moment.kernels += 1; }},
    {"moment", [](Op&, Moment& moment) { moment.begin += 1; }},
};

TEST(Fingerprint, ChangesWithAnyOfWhatAnyOperationSays) {
  const Plan plan = SomePlan();
  for (size_t index = 0; index < plan.ops.size(); ++index) {
    std::set<uint64_t> seen;
    for (const OpChange& each : kOpChanges) {
      Plan changed = plan;
      each.change(changed.ops[index], changed.moments[1]);
      EXPECT_TRUE(seen.insert(Fingerprint(changed)).second)
          << each.what << " of operation " << index;
    }
  }
}

TEST(Fingerprint, OfParametersDistinguishesDTypesDimensionsAndLists) {
  std::set<uint64_t> seen;
  ParameterSpec parameter{.name = "w", .shape = {4}};
  seen.insert(Fingerprint(parameter));
  parameter.compute = DType::kBFloat16;
  EXPECT_TRUE(seen.insert(Fingerprint(parameter)).second);
  parameter.compute.reset();
  parameter.shape = {static_cast<int64_t>(DType::kBFloat16), 4};
  EXPECT_TRUE(seen.insert(Fingerprint(parameter)).second);

  ModelSpec one = UnitChain({8, 8, 8}), other = one;
  one.units[0].parameters = {ParameterId{0}, ParameterId{1}};
  one.units[1].parameters = {};
  other.units[0].parameters = {ParameterId{0}};
  other.units[1].parameters = {ParameterId{1}};
  EXPECT_NE(Fingerprint(one), Fingerprint(other));
}

}  // namespace
}  // namespace ebb::sharding::fingerprint_test
