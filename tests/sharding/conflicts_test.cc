#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "ebb/sharding/passes/reduction.h"
#include "ebb/sharding/passes/residency.h"
#include "ebb/sharding/waits.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::conflicts_test {
namespace {

using Pairs = std::set<std::pair<int, int>>;

// Each unit is gathered and reduced alone.
Config ConfigOf(int stage, int64_t prefetch_depth) {
  Config config;
  config.zero.stage = stage;
  config.gradient_accumulation_steps = 1;
  config.zero.param_persistence_threshold = 0;
  config.zero.reduce_bucket_size = 1;
  config.ebb.coalesce_bytes = 0;
  config.ebb.prefetch_depth = prefetch_depth;
  return config;
}

Plan PlanOf(const ModelSpec& model, const Config& config) {
  absl::StatusOr<Plan> plan =
      PlanStep({.model = &model, .config = &config, .world = 2, .optimizer_states = 2});
  EXPECT_OK(plan);
  return plan.ok() ? *std::move(plan) : Plan{};
}

Pairs GatherConflicts(const Plan& plan) {
  const int units = static_cast<int>(plan.layout.units.size());
  Pairs pairs;
  for (int a = 0; a < units; ++a) {
    EXPECT_FALSE(GathersConflict(plan.table, a, a));
    for (int b = a + 1; b < units; ++b) {
      EXPECT_EQ(GathersConflict(plan.table, a, b), GathersConflict(plan.table, b, a));
      if (GathersConflict(plan.table, a, b)) pairs.insert({a, b});
    }
  }
  return pairs;
}

// The operations of a step. Operations before `issued` have been issued.
struct Ops {
  explicit Ops(const Plan& of) : plan(of), list(ListOf(of, of.carries_updates)) {
    const OpList* const only[] = {&list};
    list.round_begins
        .clear();  // rounds one behind the other, so that all that is waited for is a wait
    DeriveWaits(Cells(only, plan), list);
  }
  const Moment& Opening(int scope) const {
    return list.moments[static_cast<size_t>(plan.scopes[static_cast<size_t>(scope)].open_tick)];
  }
  bool IsIssued(int operation, int before) const {
    return list.index_of[static_cast<size_t>(operation)] < before;
  }
  // The wait of a scope's kernels, and of the kernels of scopes ahead of it, that is not issued
  // yet; -1: they may start. Kernels are the compute stream's own.
  int Missing(int scope, int before) const {
    for (int i = before; i < Opening(scope).end; ++i) {
      const Op& op = list.ops[static_cast<size_t>(i)];
      if (op.code() != Code::kKernels) continue;
      for (int wait : list.waits[static_cast<size_t>(i)].on) {
        if (wait >= before && list.ops[static_cast<size_t>(wait)].code() != Code::kKernels)
          return wait;
      }
    }
    return -1;
  }

  const Plan& plan;
  OpList list;
};

TEST(Conflicts, GathersConflictForUnitsThatShareASlot) {
  const ModelSpec model = UnitChain({64, 64, 64, 64, 64});
  EXPECT_EQ(GatherConflicts(PlanOf(model, ConfigOf(3, 0))).size(), 10u) << "all with all";
  const Pairs one_ahead = GatherConflicts(PlanOf(model, ConfigOf(3, 1)));
  for (int unit = 0; unit + 1 < 5; ++unit) EXPECT_FALSE(one_ahead.contains({unit, unit + 1}));
  EXPECT_TRUE(one_ahead.contains({0, 2}));
  for (const auto& [a, b] : GatherConflicts(PlanOf(model, ConfigOf(3, 2)))) EXPECT_GT(b - a, 2);
  EXPECT_TRUE(GatherConflicts(PlanOf(model, ConfigOf(3, INT64_MAX))).empty());
  EXPECT_TRUE(GatherConflicts(PlanOf(model, ConfigOf(2, 0))).empty()) << "all are kept whole";
}

TEST(Conflicts, GathersConflictInEitherSection) {
  Table table;
  table.units = 4;
  for (const bool whole : {true, false}) {
    for (int unit = 0; unit < table.units; ++unit) {
      for (const bool trainable : {true, false}) {
        table.Add({.purpose = whole ? Purpose::kParameter : Purpose::kGathered,
                   .of = unit,
                   .trainable = trainable,
                   .encoding = DType::kFloat32,
                   .same_as = !whole && unit == 3 ? 2 * unit + (trainable ? 0 : 1) : -1});
      }
    }
  }
  const auto place = [&](Purpose purpose, int unit, bool trainable, int64_t at, int64_t elements) {
    Array& row = table.rows[static_cast<size_t>(table.Find(purpose, unit, trainable))];
    row.elements = elements;
    row.first_extent = static_cast<int>(table.extents.size());
    row.extents = 1;
    table.extents.push_back({.begin = 0, .end = elements, .place = {.offset = at}});
  };
  using enum Purpose;
  place(kGathered, 0, true, 0, 64);
  place(kGathered, 0, false, 256, 10);  // to byte 296
  place(kGathered, 1, true, 256, 5);    // in the frozen section of unit 0
  place(kGathered, 2, true, 296, 8);
  place(kGathered, 2, false, 328, 8);
  place(kParameter, 3, true, 0, 100);
  Pairs pairs;
  for (int a = 0; a < table.units; ++a) {
    for (int b = a + 1; b < table.units; ++b)
      if (GathersConflict(table, a, b)) pairs.insert({a, b});
  }
  EXPECT_EQ(pairs, (Pairs{{0, 1}}));
}

// The definitions, as slow as they can be.

bool Meet(int64_t a, int64_t a_bytes, int64_t b, int64_t b_bytes) {
  for (int64_t byte : {a, b}) {
    if (byte >= a && byte < a + a_bytes && byte >= b && byte < b + b_bytes) return true;
  }
  return false;
}

bool SectionsMeet(const Plan& plan, int a, int b) {
  const auto sections = [&](int unit) {
    std::vector<std::pair<int64_t, int64_t>> bytes;
    for (const bool trainable : {true, false}) {
      const int row = plan.table.Find(Purpose::kGathered, unit, trainable);
      bytes.push_back({plan.table.PlaceOf(row).offset, plan.table[row].bytes()});
    }
    return bytes;
  };
  for (const auto& [x, x_bytes] : sections(a)) {
    for (const auto& [y, y_bytes] : sections(b))
      if (Meet(x, x_bytes, y, y_bytes)) return true;
  }
  return false;
}

bool GradientsMeet(const Plan& plan, const PlannedScope& a, const PlannedScope& b) {
  const auto row = [&](const PlannedScope& scope) {
    return plan.table.Find(Purpose::kGradient, GradientKey(plan.decisions, scope));
  };
  return Meet(plan.table.PlaceOf(row(a)).offset, plan.table[row(a)].bytes(),
              plan.table.PlaceOf(row(b)).offset, plan.table[row(b)].bytes());
}

template <class Check>
void ForRandomPlans(const Check& check) {
  for (int seed = 1; seed <= Cases(120); ++seed) {
    const RandomCase c(static_cast<uint64_t>(seed), /*offloads=*/seed % 3 > 0);
    SCOPED_TRACE(c.description());
    const absl::StatusOr<Plan> plan = PlanStep(c.inputs());
    if (plan.ok() && plan->scopes.size() <= 100) check(*plan);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(Conflicts, FollowTheirDefinition) {
  int conflicts = 0;
  ForRandomPlans([&](const Plan& plan) {
    const std::vector<bool>& kept_whole = plan.decisions.kept_whole;
    const int units = static_cast<int>(plan.layout.units.size());
    for (int a = 0; a < units; ++a) {
      for (int b = 0; b < units; ++b) {
        const bool meet = a != b && !kept_whole[a] && !kept_whole[b] && SectionsMeet(plan, a, b);
        ASSERT_EQ(GathersConflict(plan.table, a, b), meet) << a << " and " << b;
        conflicts += meet;
      }
    }
  });
  EXPECT_GT(conflicts, 0);
}

TEST(Conflicts, ThereAreNoneInTheDeclaredOrder) {
  ForRandomPlans([](const Plan& plan) {
    const Ops ops(plan);
    for (const Moment& moment : ops.list.moments) {
      if (moment.kind != Moment::kOpen) continue;
      const PlannedScope& opened = plan.scopes[static_cast<size_t>(moment.scope)];
      // Gathered already, and used now or later.
      for (size_t s = static_cast<size_t>(moment.scope); s < plan.scopes.size(); ++s) {
        const int gather = plan.gather_of_scope[s];
        if (gather < 0 || !ops.IsIssued(gather, moment.end)) continue;
        ASSERT_FALSE(GathersConflict(plan.table, opened.unit, plan.scopes[s].unit)) << s;
      }
    }
  });
}

// Whether a later scope may open while one is held open is one question: is all issued that its
// kernels wait for? Then its unit is gathered over no shown memory, and its gradient goes over none
// that is still to be reduced.
TEST(Conflicts, AScopeThatMayOpenBesideAHeldOneOverlapsNoLiveMemory) {
  int opens = 0, waits = 0;
  ForRandomPlans([&](const Plan& plan) {
    const int count = static_cast<int>(plan.scopes.size());
    const Decisions& d = plan.decisions;
    const Ops ops(plan);
    std::vector<int> reduce_of_scope(plan.scopes.size(), -1);
    for (const Op& op : plan.ops) {
      if (op.role != Role::kReduce) continue;
      for (const Part& part : op.parts) reduce_of_scope[part.scope] = op.number;
    }
    for (int held = 0; held < count; ++held) {
      const int issued = ops.Opening(held).end;
      for (int s = held + 1; s < count; ++s) {
        if (ops.Missing(s, issued) >= 0) {
          ++waits;
          continue;
        }
        ++opens;
        const PlannedScope& opened = plan.scopes[static_cast<size_t>(s)];
        for (int before = held; before < s; ++before) {
          const PlannedScope& other = plan.scopes[static_cast<size_t>(before)];
          const int gather = plan.gather_of_scope[static_cast<size_t>(s)];
          ASSERT_TRUE(gather < 0 || ops.IsIssued(gather, issued));
          if (plan.gather_of_scope[static_cast<size_t>(before)] >= 0) {
            ASSERT_FALSE(GathersConflict(plan.table, opened.unit, other.unit))
                << s << " while " << held << " is open, over " << before;
          }
          const int reduce = reduce_of_scope[static_cast<size_t>(before)];
          const bool summed = d.keeps_step_gradients && other.visit == opened.visit;
          if (!opened.backward || !d.trainable[opened.unit] || reduce < 0 || summed) continue;
          ASSERT_FALSE(!ops.IsIssued(reduce, issued) && GradientsMeet(plan, opened, other))
              << s << " while " << held << " is open, over the gradient of " << before;
        }
      }
    }
  });
  EXPECT_GT(opens, 1000);
  EXPECT_GT(waits, 1000);
}

}  // namespace
}  // namespace ebb::sharding::conflicts_test
