#include "ebb/sharding/copy_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/interval.h"
#include "random_model.h"
#include "tests/status.h"

namespace ebb::sharding::copy_plan_test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// A model with the random one's parameters in another order, in other units, frozen or not.
ModelSpec Reordered(const ModelSpec& model, Random& random) {
  std::vector<size_t> order(model.parameters.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<size_t>(random.Between(0, int64_t(i) - 1))]);
  ModelSpec other;
  for (size_t p : order) {
    if (other.units.empty() || random.OneIn(3))
      other.forward.push_back({.unit = other.AddUnit(absl::StrCat("unit", p))});
    ParameterSpec parameter = model.parameters[p];
    parameter.cut_rows = 0;
    parameter.trainable = random.OneIn(2);
    other.Add(static_cast<UnitId>(other.units.size() - 1), std::move(parameter));
  }
  return other;
}

// A random model, its copy, and how both are cut.
struct Case {
  explicit Case(uint64_t seed) : random(seed), base(seed) {
    world = base.world;
    std::vector<int> divisors;
    for (int n = 1; n <= world; ++n) {
      if (world % n == 0) divisors.push_back(n);
    }
    const auto shards = [&] {
      return divisors[static_cast<size_t>(
          random.Between(0, static_cast<int64_t>(divisors.size()) - 1))];
    };
    source_model = Reordered(base.model, random);
    source_model.Add(UnitId{0}, {.name = "beside", .shape = {99}, .init = Constant(0)});
    destination_model = Reordered(base.model, random);
    source_layout = LayOut(source_model, shards()).value();
    destination_layout = LayOut(destination_model, shards()).value();
    source = {&source_model, &source_layout, kDTypes[random.Between(0, 2)]};
    destination = {&destination_model, &destination_layout, kDTypes[random.Between(0, 2)]};
    bytes_max = random.OneOf({256, 4096, 1 << 16, 4 << 20});
  }

  Random random;
  RandomCase base;
  int world = 1;
  int64_t bytes_max = 0;
  ModelSpec source_model, destination_model;
  ModelLayout source_layout, destination_layout;
  CopySide source, destination;
};

std::vector<Interval> SliceOf(const ModelLayout& layout, ParameterId p, int rank) {
  const ParameterLocation& location = layout.parameters[static_cast<size_t>(p)];
  const UnitLayout& unit = layout.units[static_cast<size_t>(location.unit)];
  std::vector<Interval> own =
      IntervalsOf(location.trainable ? unit.trainable : unit.frozen, rank % layout.shards);
  std::erase_if(own, [&](const Interval& interval) { return interval.parameter != p; });
  return own;
}

TEST(CopyPlan, FillsEverySliceOnceFromARankThatOwnsIt) {
  for (int seed = 1; seed <= Cases(150); ++seed) {
    const Case c(static_cast<uint64_t>(seed));
    SCOPED_TRACE(c.base.description());
    ASSERT_OK_AND_ASSIGN(const CopyPlan plan,
                         PlanCopy(c.source, c.destination, c.world, c.bytes_max));
    // By parameter and rank: what arrives there.
    std::map<std::pair<ParameterId, int>, std::vector<std::pair<int64_t, int64_t>>> arrived;
    for (const std::vector<Transfer>& round : plan.rounds) {
      for (const Transfer& transfer : round) {
        ASSERT_EQ(c.source_model[transfer.source].name,
                  c.destination_model[transfer.destination].name);
        const std::vector<Interval> has = SliceOf(c.source_layout, transfer.source, transfer.from);
        ASSERT_EQ(has.size(), 1u);
        ASSERT_LE(has[0].begin, transfer.begin);
        ASSERT_LE(transfer.end, has[0].end);
        arrived[{transfer.destination, transfer.to}].emplace_back(transfer.begin, transfer.end);
      }
    }
    for (size_t q = 0; q < c.destination_model.parameters.size(); ++q) {
      for (int rank = 0; rank < c.world; ++rank) {
        const ParameterId id = static_cast<ParameterId>(q);
        auto& pieces = arrived[{id, rank}];
        std::sort(pieces.begin(), pieces.end());
        const std::vector<Interval> owned = SliceOf(c.destination_layout, id, rank);
        ASSERT_EQ(owned.empty(), pieces.empty());
        if (owned.empty()) continue;
        int64_t end = owned[0].begin;
        for (const auto& [from, to] : pieces) {
          ASSERT_EQ(from, end);
          ASSERT_LT(from, to);
          end = to;
        }
        ASSERT_EQ(end, owned[0].end);
      }
    }
  }
}

TEST(CopyPlan, StagingStaysBelowItsLimit) {
  int64_t largest_round = 0;
  for (int seed = 1; seed <= Cases(150); ++seed) {
    const Case c(static_cast<uint64_t>(seed));
    SCOPED_TRACE(c.base.description());
    ASSERT_OK_AND_ASSIGN(const CopyPlan plan,
                         PlanCopy(c.source, c.destination, c.world, c.bytes_max));
    int64_t most = 0;
    for (const std::vector<Transfer>& round : plan.rounds) {
      std::vector<int64_t> sent(static_cast<size_t>(c.world)), received(sent.size());
      for (const Transfer& transfer : round) {
        const int64_t bytes = transfer.staged_bytes();
        if (transfer.from == transfer.to) {
          EXPECT_EQ(bytes, 0);
        } else {
          EXPECT_GE(bytes, (transfer.end - transfer.begin) * SizeOf(transfer.dtype));
        }
        most = std::max({most, sent[static_cast<size_t>(transfer.from)] += bytes,
                         received[static_cast<size_t>(transfer.to)] += bytes});
      }
    }
    EXPECT_EQ(plan.staging_bytes, most);
    EXPECT_LE(most, c.bytes_max);
    largest_round = std::max(largest_round, most);
  }
  EXPECT_GT(largest_round, 1 << 16);  // the cases had something to stage
}

TEST(CopyPlan, SendsOneMessageAPairAndRound) {
  for (int seed = 1; seed <= Cases(100); ++seed) {
    const Case c(static_cast<uint64_t>(seed));
    SCOPED_TRACE(c.base.description());
    ASSERT_OK_AND_ASSIGN(const CopyPlan plan,
                         PlanCopy(c.source, c.destination, c.world, c.bytes_max));
    for (const std::vector<Transfer>& round : plan.rounds) {
      std::set<std::pair<int, int>> seen;
      std::pair<int, int> current{-1, -1};
      for (const Transfer& transfer : round) {
        const std::pair<int, int> pair{transfer.from, transfer.to};
        if (pair == current) continue;
        EXPECT_TRUE(seen.insert(pair).second) << pair.first << " to " << pair.second;
        current = pair;
      }
    }
  }
}

TEST(CopyPlan, IsSentInTheSmallerType) {
  ModelSpec model;
  model.forward.push_back({.unit = model.AddUnit("unit")});
  model.Add(UnitId{0}, {.name = "w", .shape = {5}, .init = Constant(0)});
  const auto travels = [&](bool from_trainable, DType from, bool to_trainable, DType to) {
    ModelSpec source = model, destination = model;
    source.parameters[0].trainable = from_trainable;
    destination.parameters[0].trainable = to_trainable;
    const ModelLayout a = LayOut(source, 1).value(), b = LayOut(destination, 1).value();
    return PlanCopy({&source, &a, from}, {&destination, &b, to}, 1, 1024)
        .value()
        .rounds.at(0)
        .at(0)
        .dtype;
  };
  const DType fp32 = DType::kFloat32, bf16 = DType::kBFloat16, fp16 = DType::kFloat16;
  EXPECT_EQ(travels(true, bf16, true, bf16), fp32);  // a master to a master
  EXPECT_EQ(travels(true, bf16, false, bf16), bf16);
  EXPECT_EQ(travels(true, fp32, false, fp16), fp16);
  EXPECT_EQ(travels(false, bf16, true, bf16), bf16);
  EXPECT_EQ(travels(false, bf16, false, fp32), bf16);
  EXPECT_EQ(travels(false, bf16, false, fp16), bf16);
  EXPECT_EQ(travels(false, fp32, false, fp32), fp32);
}

TEST(CopyPlan, SendsNothingBetweenEqualPartitions) {
  const RandomCase base(7);
  const ModelLayout layout = LayOut(base.model, 4).value();
  const CopySide side{&base.model, &layout, DType::kFloat32};
  ASSERT_OK_AND_ASSIGN(const CopyPlan plan, PlanCopy(side, side, /*world=*/8, 4096));
  EXPECT_EQ(plan.staging_bytes, 0);
  ASSERT_FALSE(plan.rounds.empty());
  for (const std::vector<Transfer>& round : plan.rounds) {
    for (const Transfer& transfer : round) EXPECT_EQ(transfer.from, transfer.to);
  }
}

TEST(CopyPlan, NamesParametersThatTheSourceLacks) {
  ModelSpec source, destination;
  source.forward.push_back({.unit = source.AddUnit("unit")});
  destination.forward.push_back({.unit = destination.AddUnit("unit")});
  for (int i = 0; i < 7; ++i) {
    destination.Add(UnitId{0}, {.name = absl::StrCat("p", i), .shape = {3}, .init = Constant(0)});
  }
  source.Add(UnitId{0}, {.name = "p3", .shape = {3}, .init = Constant(0)});
  const ModelLayout a = LayOut(source, 1).value(), b = LayOut(destination, 1).value();
  const absl::Status status =
      PlanCopy({&source, &a, DType::kFloat32}, {&destination, &b, DType::kFloat32}, 1, 64).status();
  EXPECT_THAT(status,
              testing::StatusIs(
                  absl::StatusCode::kInvalidArgument,
                  "lacks 6 parameters of the destination: 'p0', 'p1', 'p2', 'p4', 'p5', ..."));
}

TEST(CopyPlan, NamesAParameterOfAnotherShape) {
  ModelSpec source, destination;
  source.forward.push_back({.unit = source.AddUnit("unit")});
  destination.forward.push_back({.unit = destination.AddUnit("unit")});
  source.Add(UnitId{0}, {.name = "w", .shape = {3, 4}, .init = Constant(0)});
  destination.Add(UnitId{0}, {.name = "w", .shape = {4, 3}, .init = Constant(0)});
  const ModelLayout a = LayOut(source, 1).value(), b = LayOut(destination, 1).value();
  const absl::Status status =
      PlanCopy({&source, &a, DType::kFloat32}, {&destination, &b, DType::kFloat32}, 1, 64).status();
  EXPECT_THAT(status,
              testing::StatusIs(absl::StatusCode::kInvalidArgument, "'w' has the shape [4, 3]"));
  EXPECT_THAT(status, testing::Says("[3, 4]"));
}

}  // namespace
}  // namespace ebb::sharding::copy_plan_test
