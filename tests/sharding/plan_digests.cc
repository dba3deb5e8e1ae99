// plan_digests FILE [CASES] writes a line for each plan of random cases: a hash of all that its
// operations say, and of the memory, traffic and time that the planner predicts. Two commits whose
// files are equal have the same addresses, waits, bytes and simulated times.
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/report/simulate.h"
#include "ebb/sharding/report/traffic.h"
#include "ebb/sharding/state_pieces.h"
#include "ebb/sharding/waits.h"
#include "plan_variants.h"

namespace ebb::sharding {
namespace {

// An operation takes as long as its operands are large, and each line is a resource that is
// always free.
class CostsByBytes : public Costs {
 public:
  Cost Of(const Op& op) const override {
    Cost cost{.caller_seconds = 1e-6, .seconds = 1e-5};
    cost.amounts[Resource::kHostMemory] = static_cast<double>(op.bytes);
    return cost;
  }
  Amounts rates() const override {
    Amounts rates;
    rates[Resource::kHostMemory] = 1e10;
    return rates;
  }
  bool caller_computes() const override { return false; }
  bool caller_awaits_report() const override { return false; }
};

class Digest {
 public:
  template <class... Numbers>
  void Add(Numbers... numbers) {
    (hasher_.Add(static_cast<int64_t>(numbers)), ...);
  }
  void Add(const Place& place) {
    Add(place.tier, place.pool, place.offset, place.per_slice, place.of_secondary);
  }
  void Add(const Operand& operand) {
    Add(operand.access);
    if (operand.access == Access::kNone) return;  // there are no bytes at its place
    Add(operand.place);
    Add(operand.encoding.dtype, operand.count);
  }
  void Add(const CellUse& use) { Add(use.cell, use.writes, use.by_parity); }
  void Add(const OpList& list) {
    Add(list.ops.size(), list.again);
    for (size_t index = 0; index < list.ops.size(); ++index) {
      const Op& of = list.ops[index];
      const Waits waits = list.waits.empty() ? Waits() : list.waits[index];
      hasher_.Add(Name(of.role));
      Add(of.stream, of.starts, of.ends, of.carried(), of.by_parity, waits.awaited, of.divides,
          of.scope, of.goes_on, of.bytes);
      for (const UpdateDetail& update : of.updates)
        Add(update.sub_group, update.begin, update.end, update.states, update.early,
            update.keeps_parameter, update.per_slice, update.rounding_unit);
      for (const Part& part : of.parts) Add(part.unit, part.scope, part.first, part.last);
      for (const Operand& operand : of.operands) Add(operand);
      for (const int wait : waits.on) Add(wait);
      for (const CellUse& use : waits.enters) Add(use);
      for (const CellUse& use : waits.leaves) Add(use);
    }
    for (const Moment& moment : list.moments)
      Add(moment.kind, moment.scope, moment.begin, moment.end, moment.kernels);
    for (const int begin : list.round_begins) Add(begin);
  }
  template <class Row>
  void AddRows(const std::vector<Row>& rows) {
    for (const Row& row : rows) Add(row.state, row.tier, row.predicted_bytes);
  }
  std::string text() const { return absl::StrCat(absl::Hex(hasher_.hash(), absl::kZeroPad16)); }

 private:
  Hasher hasher_;
};

// The lists of calls for all state of a rank.
void AddState(const Plan& plan, Digest& digest) {
  const int last = plan.decisions.shards - 1;
  for (int unit = 0; unit < static_cast<int>(plan.layout.units.size()); ++unit) {
    digest.Add(LowerGather(plan, unit));
    digest.Add(LowerSpread(plan, unit, {.masters = true, .parameters = true, .states = true}));
    for (const StateClass what : {StateClass::kParameter, StateClass::kMaster,
                                  StateClass::kGradient, StateClass::kOptimizer}) {
      const int states = what == StateClass::kOptimizer ? plan.decisions.optimizer_states : 1;
      for (const bool trainable : {true, false}) {
        for (int state = 0; state < states && (trainable || what == StateClass::kParameter);
             ++state) {
          const StateRange range{
              .array = {.what = what, .unit = unit, .trainable = trainable, .state = state}};
          for (const StateRun& run : RunsOf(plan, last, range, 100'000)) {
            digest.Add(run.begin, run.end);
            for (Operand stored : run.stored) {
              stored.access = stored.count > 0 ? Access::kRead : Access::kNone;
              digest.Add(stored);
            }
            digest.Add(LowerStateRead(StagedRun(run, {.tier = Tier::kCpu}, false)));
            if (what == StateClass::kParameter && plan.decisions.parameter_tier != Tier::kDevice &&
                !plan.decisions.kept_whole[static_cast<size_t>(unit)])
              digest.Add(
                  LowerStateUpload(plan, range.array, StagedRun(run, {.tier = Tier::kCpu}, false)));
          }
        }
      }
    }
  }
  for (const bool second : {false, true}) digest.Add(LowerAsyncRead(plan, last, second));
}

std::string LineOf(const Plan& plan, bool walk) {
  Digest digest;
  std::vector<OpList> lists;
  for (const bool carrying : {false, true}) lists.push_back(ListOf(plan, carrying));
  const OpList* const both[] = {&lists[0], &lists[1]};
  const Cells cells(both, plan);
  for (OpList& list : lists) DeriveWaits(cells, list);
  for (const OpList& list : lists) digest.Add(list);
  digest.AddRows(PredictMemory(plan.table.bytes));
  for (const bool carrying : {false, true}) digest.AddRows(PredictTraffic(plan, carrying));
  for (const CommunicationRow& row : PredictCommunication(plan)) digest.Add(row.predicted_bytes);
  for (const Tier tier : {Tier::kDevice, Tier::kCpu}) {
    for (const ClassBytes& alive : AliveBytes(lists[0], tier))
      for (const int64_t bytes : alive) digest.Add(bytes);
  }
  double seconds = 0;
  if (!walk && !plan.scopes.empty()) {
    const absl::StatusOr<Simulated> simulated = Simulate(plan, CostsByBytes());
    if (simulated.ok()) seconds = simulated->seconds_per_step;
  }
  return absl::StrCat(digest.text(), " ", absl::Hex(std::bit_cast<uint64_t>(seconds)));
}

int Write(const std::string& path, int cases) {
  std::ofstream file(path);
  for (int number = 1; number <= cases; ++number) {
    const RandomCase random_case = CaseOf(number);
    std::vector<Variant> variants = Variants(random_case);
    if (absl::StatusOr<Plan> drain = PlanDrain(random_case.inputs()); drain.ok())
      variants.push_back({*std::move(drain), true});
    for (size_t v = 0; v < variants.size(); ++v)
      file << number << '.' << v << ' ' << LineOf(variants[v].plan, variants[v].walk) << '\n';
    Digest bytes, state;
    bytes.AddRows(PredictMemory(PlanTable(random_case.inputs())->bytes));
    bytes.AddRows(PredictMemory(PlanLeastTable(random_case.inputs())->bytes));
    AddState(variants.front().plan, state);
    file << number << ' ' << bytes.text() << ' ' << state.text() << '\n';
  }
  return file.good() ? 0 : 1;
}

}  // namespace
}  // namespace ebb::sharding

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: plan_digests FILE [CASES]\n";
    return 2;
  }
  return ebb::sharding::Write(argv[1], argc > 2 ? std::atoi(argv[2]) : 400);
}
