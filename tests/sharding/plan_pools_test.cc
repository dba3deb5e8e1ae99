// The memory of plans, over random models, worlds and configs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "ebb/sharding/pool.h"
#include "plan_variants.h"

namespace ebb::sharding::plan_pools_test {
namespace {

using ::testing::HasSubstr;

// Every address of a Pools.
std::vector<int64_t> Addresses(const Pools& pools) {
  std::vector<int64_t> all;
  const auto add = [&](std::initializer_list<int64_t> addresses) {
    all.insert(all.end(), addresses);
  };
  for (const UnitAddresses& u : pools.units) {
    add({u.parameter_trainable, u.parameter_frozen, u.gradient_shard, u.gather_trainable,
         u.gather_frozen, u.secondary_trainable, u.secondary_frozen});
  }
  for (const SubGroup& g : pools.placement.sub_groups)
    add({g.master.offset, g.states.offset, g.states_stride});
  for (const UnitPlacement& unit : pools.placement.units) {
    for (const bool trainable : {true, false})
      for (const ParameterPiece& piece : unit.pieces(trainable)) add({piece.place.offset});
  }
  for (const VisitAddresses& v : pools.visits)
    add({v.gradient, v.output, v.output_gradient, v.boundary_stride, v.place.offset});
  add({pools.staging_cast, pools.staging_rounded, pools.staging_norm, pools.staging_exchange,
       pools.staging_sums, pools.staging_gradient, pools.staging_master, pools.evaluation_stride});
  for (const SlotRing& ring : {pools.parameter_slots, pools.gradient_slots, pools.boundary_slots,
                               pools.master_slots, pools.host_work.ring, pools.device_work.ring})
    add({ring.bytes, ring.first.offset});
  for (const Place& place :
       {pools.landing, pools.host_norm, pools.host_gradient, pools.host_master})
    add({place.offset});
  return all;
}

// Every number of a Pools.
std::vector<int64_t> Flat(const Pools& pools) {
  std::vector<int64_t> flat = Addresses(pools);
  for (const auto* bytes : {&pools.bytes, &pools.host_bytes, &pools.file_bytes})
    flat.insert(flat.end(), std::begin(*bytes), std::end(*bytes));
  const auto add = [&](std::initializer_list<int64_t> numbers) {
    flat.insert(flat.end(), numbers);
  };
  for (const SubGroup& g : pools.placement.sub_groups)
    add({static_cast<int64_t>(g.tier), g.unit, g.begin, g.end});
  for (const UnitPlacement& unit : pools.placement.units) {
    add({static_cast<int64_t>(unit.gradient), unit.first_sub_group, unit.sub_groups});
    for (const bool trainable : {true, false}) {
      for (const ParameterPiece& piece : unit.pieces(trainable))
        add({static_cast<int64_t>(piece.place.tier), piece.begin, piece.end});
    }
  }
  for (const WorkSlots& work : {pools.host_work, pools.device_work}) {
    add({work.ring.count, work.master, work.states, work.states_stride, work.gradient,
         work.parameter});
  }
  const auto add_place = [&](const Place& place) {
    add({static_cast<int64_t>(place.tier), static_cast<int64_t>(place.pool), place.per_slice});
  };
  for (const VisitAddresses& v : pools.visits) {
    add({v.leaves ? 1 : 0});
    add_place(v.place);
  }
  for (const SlotRing& ring : {pools.parameter_slots, pools.gradient_slots, pools.boundary_slots,
                               pools.master_slots, pools.host_work.ring, pools.device_work.ring})
    add_place(ring.first);
  for (const Place& place :
       {pools.landing, pools.host_norm, pools.host_gradient, pools.host_master})
    add_place(place);
  add({pools.staging_sums_bytes});
  add({pools.parameter_slots.count, pools.gradient_slots.count, pools.boundary_slots.count,
       pools.master_slots.count, pools.evaluation_micro_batches});
  return flat;
}

TEST(PlanLaws, EveryVariantHasTheSamePools) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    const std::vector<Variant> variants = Variants(random_case);
    for (const Variant& variant : variants)
      ASSERT_EQ(Flat(variant.plan.pools), Flat(variants.front().plan.pools));
    const absl::StatusOr<Plan> drain = PlanDrain(random_case.inputs());
    ASSERT_TRUE(drain.ok()) << drain.status();
    ASSERT_EQ(Flat(drain->pools), Flat(variants.front().plan.pools));
  }
}

TEST(PlanLaws, AddressesAreAligned) {
  for (int number = 1; number <= Cases(600); ++number) {
    const RandomCase random_case = CaseOf(number);
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs());
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (int64_t address : Addresses(plan->pools)) ASSERT_EQ(address % kPoolAlignment, 0);
  }
}

// A config may grant a tier exactly the bytes of its pools, and not a page less.
TEST(PlanLaws, PoolsStayWithinWhatTheConfigGrants) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/true);
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs());
    ASSERT_TRUE(plan.ok()) << plan.status();
    const int64_t device = BytesOn(Tier::kDevice, *plan), host = BytesOn(Tier::kCpu, *plan);
    const OffloadParamConfig& parameters = random_case.config.zero.offload_param;
    ASSERT_LE(plan->pools.parameter_slots.count, parameters.buffer_count);
    const int64_t buffer_size = parameters.buffer_size.value_or(100'000'000);
    ASSERT_LE(plan->pools.parameter_slots.bytes / SizeOf(random_case.config.compute), buffer_size);
    EbbConfig& ebb = random_case.config.ebb;
    ASSERT_LE(host, ebb.host_memory.value_or(host));
    const SlotRing& masters = plan->pools.master_slots;
    if (masters.count > 0) {
      ASSERT_LE(plan->pools.parameter_slots.count * plan->pools.parameter_slots.bytes +
                    masters.count * masters.bytes,
                parameters.buffer_count * buffer_size * SizeOf(random_case.config.compute));
    }
    ebb.device_memory = device;
    ASSERT_TRUE(PlanStep(random_case.inputs()).ok());
    ebb.device_memory = device - 1;
    const absl::StatusOr<Plan> refused = PlanStep(random_case.inputs());
    ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
    ASSERT_THAT(std::string(refused.status().message()), HasSubstr("ebb.device_memory"));
    ebb.device_memory.reset();
    for (const int64_t budget : {host, host / 2, int64_t{0}}) {
      ebb.host_memory = budget;
      const absl::StatusOr<Plan> granted = PlanStep(random_case.inputs());
      if (granted.ok()) {
        ASSERT_LE(BytesOn(Tier::kCpu, *granted), budget);
      } else {
        ASSERT_LT(budget, host);
        ASSERT_EQ(granted.status().code(), absl::StatusCode::kResourceExhausted);
        ASSERT_THAT(std::string(granted.status().message()), HasSubstr("ebb.host_memory"));
      }
    }
  }
}

}  // namespace
}  // namespace ebb::sharding::plan_pools_test
