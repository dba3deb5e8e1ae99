#include "ebb/sharding/report/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "ebb/sharding/report/costs.h"
#include "random_model.h"
#include "tests/status.h"

namespace ebb::sharding::simulate_test {
namespace {

using enum Resource;

Amounts Of(std::initializer_list<std::pair<Resource, double>> amounts) {
  Amounts made;
  for (const auto& [resource, amount] : amounts) made[resource] = amount;
  return made;
}

// Programs by hand, on a machine with rates of 1 a second.

struct Written {
  StreamId stream{};
  Cost cost;
  std::vector<Operand> operands = {};
  Role role = Role::kDownload;
  bool carried = false;
};

class WrittenCosts : public Costs {
 public:
  Cost Of(const Op& op) const override { return list[static_cast<size_t>(op.number)]; }
  Amounts rates() const override { return all; }
  bool caller_computes() const override { return computes; }
  bool caller_awaits_report() const override { return awaits; }

  std::vector<Cost> list;
  Amounts all;
  bool computes = false, awaits = false;
};

constexpr int kUnits = 2, kSlices = 4;

Cost Seconds(double seconds) {
  return {.seconds = seconds};
}
Cost Uses(Resource resource, double amount) {
  return {.amounts = Of({{resource, amount}})};
}

Operand Memory(Access access, int64_t begin, int64_t bytes = 64) {
  return {
      .place = {.pool = StateClass::kGather, .offset = begin}, .access = access, .count = bytes};
}
Operand Control(Access access, int64_t cell) {
  return {.place = {.tier = Tier::kCpu, .pool = StateClass::kControl, .offset = cell},
          .access = access,
          .count = 1};
}
Operand Losses(Access access) {
  return Control(access, ControlCells(kUnits).sums());
}

class Program {
 public:
  Program() {
    for (int r = 0; r < kResources; ++r) costs.all[static_cast<Resource>(r)] = 1;
  }
  void Write(OpList& list, const std::vector<Written>& ops) {
    for (const Written& each : ops) {
      Op op{.role = each.role,
            .stream = each.stream,
            .starts = LineOf(each.stream),
            .ends = EndOf(each.stream),
            .when = each.carried ? When::kCarrying : When::kAlways,
            .number = static_cast<int>(costs.list.size()),
            .operands = memory_.operands.Keep(each.operands)};
      for (const Operand& operand : each.operands) {
        op.by_parity |= operand.place.pool == StateClass::kControl &&
                        ControlCells(kUnits).by_parity(operand.place.offset);
      }
      list.ops.push_back(op);
      costs.list.push_back(each.cost);
    }
  }
  explicit Program(const std::vector<Written>& every_step) : Program() {
    Write(first_, every_step);
    Write(later_, every_step);
  }
  Program(const std::vector<Written>& first, const std::vector<Written>& later) : Program() {
    Write(first_, first);
    Write(later_, later);
  }

  absl::StatusOr<Simulated> TrySimulate(int steps = kSimulatedSteps) {
    const OpList* const both[] = {&first_, &later_};
    const Cells cells(both, kUnits, kSlices, /*secondary_slices=*/1);
    for (OpList* list : {&first_, &later_}) DeriveWaits(cells, *list);
    return Simulate(cells, first_, later_, costs, steps);
  }
  Simulated Run(int steps = kSimulatedSteps) {
    absl::StatusOr<Simulated> simulated = TrySimulate(steps);
    EXPECT_OK(simulated);
    return *std::move(simulated);
  }

  WrittenCosts costs;

 private:
  OpMemory memory_;
  OpList first_, later_;
};

using Times = std::pair<double, double>;
Times At(const Simulated& simulated, int step, int op) {
  for (const SimulatedSpan& span : simulated.spans)
    if (span.step == step && span.op == op) return {span.begin, span.end};
  ADD_FAILURE() << "no operation " << op << " of step " << step;
  return {};
}

double LineOfPath(const Simulated& simulated, StreamId stream) {
  return simulated.critical.lines[LineOf(stream)];
}

TEST(Simulate, OperationsOfOneStreamRunOneAfterTheOther) {
  const Simulated simulated = Program({{StreamId::kCompute, Seconds(1)},
                                       {StreamId::kCompute, Seconds(2)},
                                       {StreamId::kCompute, Seconds(0)},
                                       {StreamId::kCompute, Seconds(4)}})
                                  .Run();
  EXPECT_EQ(At(simulated, 0, 1), Times(1, 3));
  EXPECT_EQ(At(simulated, 0, 2), Times(3, 3));
  EXPECT_EQ(At(simulated, 1, 3), Times(10, 14));
  EXPECT_EQ(simulated.seconds_per_step, 7);
  EXPECT_EQ(simulated.seconds, 42);
  EXPECT_EQ(simulated.busy.lines[LineOf(StreamId::kCompute)], 7);
  EXPECT_EQ(LineOfPath(simulated, StreamId::kCompute), 7);
  EXPECT_EQ(simulated.critical_line(), LineOf(StreamId::kCompute));
  EXPECT_EQ(simulated.critical_resource(), std::nullopt);
}

TEST(Simulate, StreamsOverlapExceptForWaits) {
  const Simulated apart =
      Program({{StreamId::kUpload, Seconds(2)}, {StreamId::kCompute, Seconds(3)}}).Run();
  EXPECT_EQ(At(apart, 0, 1), Times(0, 3));
  EXPECT_EQ(apart.seconds_per_step, 3);
  // One buffer, for which the next step's upload waits too.
  const Simulated together = Program({{StreamId::kUpload, Seconds(2), {Memory(Access::kWrite, 0)}},
                                      {StreamId::kCompute, Seconds(3), {Memory(Access::kRead, 0)}}})
                                 .Run();
  EXPECT_EQ(At(together, 0, 1), Times(2, 5));
  EXPECT_EQ(At(together, 1, 0), Times(5, 7));
  EXPECT_EQ(together.seconds_per_step, 5);
  EXPECT_EQ(LineOfPath(together, StreamId::kUpload), 2);
  EXPECT_EQ(LineOfPath(together, StreamId::kCompute), 3);
  // Two buffers: the second fills while the first is in use.
  const Simulated two = Program({{StreamId::kUpload, Seconds(2), {Memory(Access::kWrite, 0)}},
                                 {StreamId::kUpload, Seconds(2), {Memory(Access::kWrite, 64)}},
                                 {StreamId::kCompute, Seconds(3), {Memory(Access::kRead, 0)}},
                                 {StreamId::kCompute, Seconds(3), {Memory(Access::kRead, 64)}}})
                            .Run();
  EXPECT_EQ(two.seconds_per_step, 6);
  EXPECT_EQ(At(two, 1, 0), Times(5, 7));
}

TEST(Simulate, ConcurrentOperationsShareResources) {
  const Simulated simulated = Program({{StreamId::kUpload, Uses(kToDevice, 1)},
                                       {StreamId::kDownload, Uses(kToDevice, 3)},
                                       {StreamId::kCompute, Seconds(2)}})
                                  .Run();
  EXPECT_EQ(At(simulated, 0, 0), Times(0, 2)) << "half the rate";
  EXPECT_EQ(At(simulated, 0, 2), Times(0, 2)) << "uses another resource";
  EXPECT_EQ(simulated.seconds, 24) << "nothing is left unused";
  EXPECT_EQ(simulated.busy.resources[static_cast<size_t>(kToDevice)], 4);
}

// Alone it takes 4 seconds at a quarter of the rate, and 3 at the full rate.
TEST(Simulate, ATaskLimitedToAShareSlowsDownAlike) {
  const Simulated simulated =
      Program({{StreamId::kUpload, {.seconds = 4, .amounts = Of({{kCores, 1}})}},
               {StreamId::kDownload, Uses(kCores, 3)},
               {StreamId::kCompute, Seconds(0), {Memory(Access::kWrite, 0)}}})
          .Run();
  EXPECT_DOUBLE_EQ(At(simulated, 0, 1).second, 3.75);
}

TEST(Simulate, TheCriticalResourceIsTheOneThatIsFullOnThePath) {
  const Simulated simulated =
      Program({{StreamId::kReadStates, Uses(kDiskRead, 5), {Memory(Access::kWrite, 0)}},
               {StreamId::kHostUpdate, Uses(kCores, 2), {Memory(Access::kReadWrite, 0)}},
               {StreamId::kCompute, Seconds(1), {Memory(Access::kRead, 0)}}})
          .Run();
  EXPECT_EQ(simulated.seconds_per_step, 8);
  EXPECT_EQ(simulated.critical_resource(), kDiskRead);
  EXPECT_EQ(simulated.critical_line(), kStatesRead);
  EXPECT_EQ(simulated.critical.resources[static_cast<size_t>(kCores)], 2);
  EXPECT_EQ(std::accumulate(simulated.critical.lines.begin(), simulated.critical.lines.end(), 0.0),
            8);
}

// Transfers are asked for ahead, because answers take long; bytes come in order.
TEST(Simulate, TransfersStartTogetherAndMoveInTurn) {
  const Cost read{.latency = 0.5, .amounts = Of({{kDiskRead, 1}})};
  const Simulated simulated =
      Program({{StreamId::kReadStates, read, {Memory(Access::kWrite, 0)}},
               {StreamId::kReadStates, read, {Memory(Access::kWrite, 64)}},
               {StreamId::kHostUpdate, Seconds(1), {Memory(Access::kRead, 0)}},
               {StreamId::kReadStates, read, {Memory(Access::kWrite, 0)}},
               {StreamId::kReadStates, read, {Memory(Access::kWrite, 128)}}})
          .Run();
  EXPECT_EQ(At(simulated, 0, 0), Times(0, 1.5));
  EXPECT_EQ(At(simulated, 0, 1), Times(0, 2.5));
  EXPECT_EQ(At(simulated, 0, 2), Times(1.5, 2.5));
  EXPECT_EQ(At(simulated, 0, 3), Times(2.5, 4)) << "once the update has read";
  EXPECT_EQ(At(simulated, 0, 4), Times(2.5, 5)) << "behind the start of the one before it";
}

TEST(Simulate, QueuedTransfersWaitForThoseBefore) {
  const Operand first = Memory(Access::kWrite, 0), second = Memory(Access::kWrite, 64);
  const Written use{
      StreamId::kCompute, Seconds(1), {Memory(Access::kRead, 0), Memory(Access::kRead, 64)}};
  const Simulated moving = Program({{StreamId::kReadStates, Uses(kDiskRead, 2), {first}},
                                    {StreamId::kReadStates, Uses(kDiskRead, 3), {second}},
                                    use})
                               .Run();
  EXPECT_EQ(moving.seconds_per_step, 6);
  EXPECT_EQ(moving.critical.lines[kStatesRead], 5);
  EXPECT_EQ(moving.busy.lines[kStatesRead], 5);
  EXPECT_EQ(moving.critical.resources[static_cast<size_t>(kDiskRead)], 5);
  // The second answers when the first is long over.
  const Simulated answering =
      Program({{StreamId::kReadStates, Uses(kDiskRead, 2), {first}},
               {StreamId::kReadStates, {.latency = 3, .amounts = Of({{kDiskRead, 1}})}, {second}},
               use})
          .Run();
  EXPECT_EQ(answering.seconds_per_step, 5);
  EXPECT_EQ(answering.critical.lines[kStatesRead], 4);
  EXPECT_EQ(answering.busy.lines[kStatesRead], 4);
}

// The update of the step before runs beside forward, which waits for its writes.
TEST(Simulate, CarriedUpdatesRunInTheNextStep) {
  const Written forward{StreamId::kCompute, Seconds(2), {Memory(Access::kRead, 0)}},
      backward{StreamId::kCompute, Seconds(3), {Memory(Access::kWrite, 64)}},
      update{StreamId::kHostUpdate,
             Seconds(1),
             {Memory(Access::kReadWrite, 0), Memory(Access::kRead, 64)},
             Role::kUpdate,
             /*carried=*/true};
  const Simulated simulated = Program({forward, backward}, {update, forward, backward}).Run();
  EXPECT_EQ(At(simulated, 0, 0), Times(0, 2));
  EXPECT_EQ(At(simulated, 1, 0), Times(5, 6)) << "behind the gradient";
  EXPECT_EQ(At(simulated, 1, 1), Times(6, 8));
  EXPECT_EQ(simulated.seconds_per_step, 6);
}

TEST(Simulate, OnTheCpuNothingIsIssuedWhileKernelsRun) {
  const auto program = [] {
    return Program({{StreamId::kCompute, Seconds(3), {Memory(Access::kRead, 0)}, Role::kMark},
                    {StreamId::kGather, Seconds(1), {Memory(Access::kWrite, 64)}},
                    {StreamId::kCompute, Seconds(3), {Memory(Access::kRead, 64)}, Role::kMark}});
  };
  Program on_gpu = program(), on_cpu = program();
  on_cpu.costs.computes = true;
  EXPECT_EQ(At(on_gpu.Run(), 0, 1), Times(0, 1));
  EXPECT_EQ(on_gpu.Run().seconds_per_step, 6);
  EXPECT_EQ(At(on_cpu.Run(), 0, 1), Times(3, 4));
  EXPECT_EQ(At(on_cpu.Run(), 0, 2), Times(4, 7));
  EXPECT_EQ(on_cpu.Run().seconds_per_step, 7);
}

TEST(Simulate, ACallerThatIsSlowIsWaitedFor) {
  const Simulated simulated = Program({{StreamId::kCompute, {.caller_seconds = 2, .seconds = 1}},
                                       {StreamId::kCompute, {.caller_seconds = 2, .seconds = 1}}})
                                  .Run();
  EXPECT_EQ(At(simulated, 0, 0), Times(2, 3));
  EXPECT_EQ(At(simulated, 0, 1), Times(4, 5));
  EXPECT_EQ(simulated.seconds_per_step, 4);
  EXPECT_EQ(simulated.busy.lines[kCallerLine], 4);
  EXPECT_EQ(simulated.critical_line(), kCallerLine);
}

// The upload waits for nothing but to be issued.
TEST(Simulate, ACallerIsTwoStepsAheadAtMost) {
  const std::vector<Written> step = {
      {StreamId::kUpload, Seconds(0.25)},
      {StreamId::kCompute, Seconds(1), {Losses(Access::kReadWrite)}, Role::kMark},
      {StreamId::kReduce, Seconds(1), {Losses(Access::kRead)}, Role::kConclude}};
  Program free(step), reporting(step);
  const Simulated ahead = free.Run();
  EXPECT_EQ(At(ahead, 1, 0).first, 0.25);
  EXPECT_EQ(At(ahead, 2, 0).first, 2) << "behind the exchange of the step before the last";
  EXPECT_EQ(At(ahead, 3, 0).first, 3);
  EXPECT_EQ(ahead.seconds_per_step, 1);
  reporting.costs.awaits = true;
  const Simulated reports = reporting.Run();
  EXPECT_EQ(At(reports, 1, 0).first, 2);
  EXPECT_EQ(reports.seconds_per_step, 2);
}

TEST(Simulate, CostsThatMakeNoSenseAreErrors) {
  const auto error = [](const Cost& cost, int steps = kSimulatedSteps) {
    Program program({{StreamId::kCompute, cost}});
    program.costs.all[kNetwork] = 0;
    program.costs.all[kPeers] = std::numeric_limits<double>::quiet_NaN();
    return std::string(program.TrySimulate(steps).status().message());
  };
  EXPECT_EQ(error(Seconds(1)), "");
  EXPECT_EQ(error(Seconds(-1)), "the cost of 'download' has a time of -1 seconds");
  EXPECT_EQ(error({.latency = std::numeric_limits<double>::infinity()}),
            "the cost of 'download' has a time of inf seconds");
  EXPECT_EQ(error(Uses(kNetwork, 1)),
            "the cost of 'download' takes 1 of 'network', of which there is 0 a second");
  EXPECT_EQ(error(Uses(kPeers, 1)),
            "the cost of 'download' takes 1 of 'peers', of which there is nan a second");
  EXPECT_EQ(error(Uses(kCores, -1)),
            "the cost of 'download' takes -1 of 'cores', of which there is 1 a second");
  EXPECT_EQ(error(Seconds(1), 3),
            "a simulation of 3 steps: the steady state needs at least 4, pass more");
}

TEST(Simulate, EachLineHasTheNameOfItsStream) {
  EXPECT_EQ(NameOfLine(LineOf(StreamId::kCompute)), Name(StreamId::kCompute));
  EXPECT_EQ(NameOfLine(kStatesRead), Name(StreamId::kReadStates));
  EXPECT_EQ(NameOfLine(kCallerLine), "caller");
  for (int line = 0; line <= kCallerLine; ++line) EXPECT_NE(NameOfLine(line), "") << line;
}

TEST(Simulate, AListWithoutOperationsTakesNoTime) {
  EXPECT_EQ(Program(std::vector<Written>()).Run().seconds_per_step, 0);
}

using enum Resource;

std::vector<RunningShare> Share(const Amounts& rates, const std::vector<Amounts>& demands) {
  std::vector<RunningShare> running;
  for (const Amounts& demand : demands) running.push_back({.demand = demand});
  ShareRates(rates, running);
  return running;
}

TEST(ShareRates, OneAloneRunsAtFullSpeed) {
  const auto shares = Share(Of({{kNetwork, 8}, {kCores, 2}}),
                            {Of({{kNetwork, 8}, {kCores, 1}}), Of({{kCores, 1}}), Of({})});
  for (const RunningShare& share : shares) EXPECT_EQ(share.speed, 1);
  EXPECT_EQ(shares[0].limit, static_cast<Limit>(kCores)) << "the first of those that are full";
  EXPECT_EQ(shares[1].limit, static_cast<Limit>(kCores));
  EXPECT_EQ(shares[2].limit, kNoLimit);
}

TEST(ShareRates, AFullResourceSlowsItsUsersAndLeavesTheRestToOthers) {
  const auto shares = Share(Of({{kDiskRead, 1}, {kDiskWrite, 1}, {kDisk, 1.75}}),
                            {Of({{kDiskRead, 1}, {kDisk, 1}}), Of({{kDiskRead, 1}, {kDisk, 1}}),
                             Of({{kDiskWrite, 1}, {kDisk, 1}})});
  EXPECT_EQ(shares[0].speed, 0.5);
  EXPECT_EQ(shares[1].speed, 0.5);
  EXPECT_EQ(shares[0].limit, static_cast<Limit>(kDiskRead));
  EXPECT_EQ(shares[2].speed, 0.75);
  EXPECT_EQ(shares[2].limit, static_cast<Limit>(kDisk));
}

// None is above its rate; each is as fast as alone or uses one that is full; together at least
// one's full speed.
TEST(ShareRates, NoRateIsExceededAndNoneIsLeftWhereItIsWanted) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Amounts rates;
    for (int r = 0; r < kResources; ++r)
      rates[static_cast<Resource>(r)] = static_cast<double>(random.Between(1, 1000));
    std::vector<Amounts> demands(static_cast<size_t>(random.Between(1, 12)));
    for (Amounts& demand : demands) {
      for (int r = 0; r < kResources; ++r) {
        const auto resource = static_cast<Resource>(r);
        if (random.OneIn(3))
          demand[resource] = rates[resource] * static_cast<double>(random.Between(1, 100)) / 100;
      }
    }
    const auto shares = Share(rates, demands);
    double together = 0;
    Amounts used;
    for (const RunningShare& share : shares) {
      EXPECT_GT(share.speed, 0);
      EXPECT_LE(share.speed, 1);
      together += share.speed;
      for (int r = 0; r < kResources; ++r)
        used[static_cast<Resource>(r)] += share.speed * share.demand[static_cast<Resource>(r)];
    }
    EXPECT_GE(together, 1 - 1e-9);
    for (int r = 0; r < kResources; ++r)
      EXPECT_LE(used[static_cast<Resource>(r)], rates[static_cast<Resource>(r)] * (1 + 1e-9));
    for (const RunningShare& share : shares) {
      if (share.limit == kNoLimit) {
        EXPECT_EQ(share.speed, 1);
        continue;
      }
      const auto limit = static_cast<Resource>(share.limit);
      EXPECT_GT(share.demand[limit], 0);
      EXPECT_GE(used[limit], rates[limit] * (1 - 1e-9));
    }
  }
}

}  // namespace
}  // namespace ebb::sharding::simulate_test
