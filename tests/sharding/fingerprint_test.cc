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
void ChangeFirst(std::span<const T> Operation::*list, Plan& plan, void (*change)(T& first)) {
  static std::vector<std::vector<T>> kept;
  for (Operation& operation : plan.operations) {
    if ((operation.*list).empty()) continue;
    std::vector<T>& changed = kept.emplace_back((operation.*list).begin(), (operation.*list).end());
    change(changed.front());
    operation.*list = changed;
    return;
  }
}
void ChangeOperand(Plan& plan, void (*change)(Operand& operand)) {
  ChangeFirst<Operand>(&Operation::operands, plan, change);
}
void ChangeUpdate(Plan& plan, void (*change)(UpdateDetail& update)) {
  ChangeFirst<UpdateDetail>(&Operation::updates, plan, change);
}
void ChangePart(Plan& plan, void (*change)(Part& part)) {
  ChangeFirst<Part>(&Operation::parts, plan, change);
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
    {"a stream", [](Plan& plan) { plan.operations[0].stream = StreamId::kUpload; }},
    {"a condition", [](Plan& plan) { plan.operations[0].condition = Condition::kCarrying; }},
    {"bytes of an operation", [](Plan& plan) { plan.operations[0].bytes += 8; }},
    {"one operand fewer",
     [](Plan& plan) {
       std::span<const Operand>& operands = plan.operations.back().operands;
       operands = operands.first(operands.size() - 1);
     }},
    // Another dtype of as many bytes.
    {"a dtype",
     [](Plan& plan) {
       ChangeOperand(plan, [](Operand& operand) { operand.dtype = DType::kFloat16; });
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

// A change of one instruction of a fragment, or of one moment.
struct FragmentChange {
  const char* what;
  void (*change)(Instruction& instruction, FragmentMoment& moment);
};
const FragmentChange kFragmentChanges[] = {
    {"nothing", [](Instruction&, FragmentMoment&) {}},
    {"code", [](Instruction& of, FragmentMoment&) { of.code = Code::kCastMasters; }},
    {"role", [](Instruction& of, FragmentMoment&) { of.role = OperationKind::kWrite; }},
    {"stream", [](Instruction& of, FragmentMoment&) { of.stream = StreamId::kUpload; }},
    {"start", [](Instruction& of, FragmentMoment&) { of.starts = kWritten; }},
    {"end", [](Instruction& of, FragmentMoment&) { of.ends = kWritten; }},
    {"lane", [](Instruction& of, FragmentMoment&) { of.lane = Lane::kReplicas; }},
    {"carried", [](Instruction& of, FragmentMoment&) { of.carried ^= true; }},
    {"brings parameters", [](Instruction& of, FragmentMoment&) { of.brings_parameters ^= true; }},
    {"parity", [](Instruction& of, FragmentMoment&) { of.by_parity ^= true; }},
    {"divides", [](Instruction& of, FragmentMoment&) { of.divides ^= true; }},
    {"via", [](Instruction& of, FragmentMoment&) { of.via = DType::kFloat32; }},
    {"scope", [](Instruction& of, FragmentMoment&) { of.scope += 1; }},
    {"goes on", [](Instruction& of, FragmentMoment&) { of.goes_on ^= true; }},
    {"operation", [](Instruction& of, FragmentMoment&) { of.operation += 1; }},
    {"bytes", [](Instruction& of, FragmentMoment&) { of.bytes += 1; }},
    {"operands", [](Instruction& of, FragmentMoment&) { of.operands = {}; }},
    {"kernels", [](Instruction&, FragmentMoment& moment) { moment.kernels += 1; }},
    {"moment", [](Instruction&, FragmentMoment& moment) { moment.begin += 1; }},
};

TEST(Fingerprint, OfAFragmentChangesWithAnyOfWhatItsInstructionsSay) {
  const Plan plan = SomePlan();
  for (size_t index = 0; index < Lower(plan, false).instructions.size(); ++index) {
    std::set<uint64_t> seen;
    for (const FragmentChange& each : kFragmentChanges) {
      Fragment fragment = Lower(plan, /*carrying=*/false);
      each.change(fragment.instructions[index], fragment.moments[1]);
      EXPECT_TRUE(seen.insert(Fingerprint(fragment)).second)
          << each.what << " of instruction " << index;
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
