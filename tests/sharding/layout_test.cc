#include "ebb/sharding/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "random_model.h"

namespace ebb::sharding::layout_test {
namespace {

using ::testing::HasSubstr;

TEST(Layout, HasEveryParameterOnceInItsUnitsSection) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    const ModelSpec& model = random_case.model;
    const absl::StatusOr<ModelLayout> layout = LayOut(model, random_case.world);
    ASSERT_TRUE(layout.ok()) << layout.status();
    ASSERT_EQ(layout->shards, random_case.world);
    ASSERT_EQ(layout->units.size(), model.units.size());
    std::set<ParameterId> found;
    for (size_t u = 0; u < model.units.size(); ++u) {
      const UnitLayout& unit = layout->units[u];
      for (const Section* section : {&unit.trainable, &unit.frozen}) {
        for (const Placement& placement : section->placements) {
          ASSERT_TRUE(found.insert(placement.parameter).second);
          ASSERT_EQ(model[placement.parameter].trainable, section == &unit.trainable);
          const ParameterLocation& location =
              layout->parameters[static_cast<size_t>(placement.parameter)];
          ASSERT_EQ(location.unit, static_cast<int>(u));
          ASSERT_EQ(location.trainable, section == &unit.trainable);
          ASSERT_EQ(location.offset, placement.offset);
          ASSERT_EQ(location.elements, Elements(model[placement.parameter].shape));
        }
      }
      ASSERT_EQ(unit.elements(), unit.shard() * random_case.world);
    }
    ASSERT_EQ(found.size(), model.parameters.size());
  }
}

// Ranks compute it each for themselves, and no setting of the config takes part.
TEST(Layout, IsAFunctionOfModelAndWorldAlone) {
  for (int seed = 1; seed <= Cases(100); ++seed) {
    const RandomCase one(seed), other(seed);
    SCOPED_TRACE(one.description());
    const absl::StatusOr<ModelLayout> a = LayOut(one.model, one.world);
    const absl::StatusOr<ModelLayout> b = LayOut(other.model, other.world);
    ASSERT_TRUE(a.ok() && b.ok());
    for (size_t p = 0; p < a->parameters.size(); ++p)
      ASSERT_EQ(a->parameters[p].offset, b->parameters[p].offset);
    for (size_t u = 0; u < a->units.size(); ++u)
      ASSERT_EQ(a->units[u].shard(), b->units[u].shard());
  }
}

ModelSpec ModelOf(ParameterSpec parameter) {
  ModelSpec model;
  const UnitId unit = model.AddUnit("block");
  model.Add(unit, std::move(parameter));
  model.forward = {{.unit = unit}};
  return model;
}

TEST(Layout, RefusesRowCutsThatPadTooMuchByTheParametersName) {
  const ModelSpec model =
      ModelOf({.name = "experts", .shape = {3, 1'000}, .init = Constant(0), .cut_rows = 1});
  EXPECT_THAT(std::string(LayOut(model, 2).status().message()), HasSubstr("'experts'"));
  EXPECT_TRUE(LayOut(model, 1).ok());
}

TEST(Layout, RefusesAWorldWithoutRanks) {
  const ModelSpec model = ModelOf({.name = "w", .shape = {3}, .init = Constant(0)});
  EXPECT_EQ(LayOut(model, 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Layout, ReturnsTheModelsError) {
  const ModelSpec model = ModelOf({.name = "w", .shape = {0}, .init = Constant(0)});
  EXPECT_THAT(std::string(LayOut(model, 1).status().message()), HasSubstr("\"w\""));
}

}  // namespace
}  // namespace ebb::sharding::layout_test
