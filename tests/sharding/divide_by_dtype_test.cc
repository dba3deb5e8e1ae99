#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/model.h"

namespace ebb::divide_by_dtype_test {
namespace {

ParameterId Add(ModelSpec& model, UnitId unit, std::string name, std::optional<DType> compute,
                bool trainable = true) {
  return model.Add(unit, {.name = std::move(name),
                          .shape = {4},
                          .init = Constant(0),
                          .trainable = trainable,
                          .compute = compute});
}

ModelSpec Block() {
  ModelSpec model;
  const UnitId block = model.AddUnit("block"), head = model.AddUnit("head");
  Add(model, block, "base", DType::kInt8, /*trainable=*/false);
  Add(model, block, "norm", DType::kFloat32);
  Add(model, block, "adapter", std::nullopt);
  Add(model, block, "bias", DType::kFloat32);
  Add(model, head, "head", DType::kBFloat16);
  model.forward = {{.unit = block}, {.unit = head}};
  return model;
}

std::string Events(const ModelSpec& model) {
  std::string text;
  for (const ScopeEvent& event : model.order) {
    text += event.opens ? "(" : ")";
    text += event.backward ? "B" : "F";
    text += std::to_string(event.visit);
  }
  return text;
}

TEST(DivideByDType, PartsOpenAndCloseInsideTheirUnitWhichKeepsTheTrainedParameters) {
  const ModelSpec model = DivideByDType(Block(), DType::kBFloat16);
  ASSERT_EQ(model.units.size(), 4u);
  EXPECT_EQ(model.units[0].name, "block");
  EXPECT_EQ(model.units[0].parameters, (std::vector{ParameterId{1}, ParameterId{3}}));
  EXPECT_EQ(model.units[0].parts, (std::vector{UnitId{2}, UnitId{3}}));
  EXPECT_EQ(model.units[2].name, "block [bf16]");
  EXPECT_EQ(model.units[2].parameters, (std::vector{ParameterId{2}}));
  EXPECT_EQ(model.units[3].name, "block [int8]");
  EXPECT_EQ(model.units[3].parameters, (std::vector{ParameterId{0}}));
  std::vector<UnitId> visits;
  for (const Visit& visit : model.forward) visits.push_back(visit.unit);
  EXPECT_EQ(visits, (std::vector{UnitId{0}, UnitId{2}, UnitId{3}, UnitId{1}}));
  EXPECT_EQ(Events(model), "(F0(F1(F2)F2)F1)F0(F3)F3(B3)B3(B0(B1(B2)B2)B1)B0");
  EXPECT_TRUE(Validate(model).ok()) << Validate(model);
  EXPECT_EQ(sharding::Fingerprint(DivideByDType(model, DType::kBFloat16)),
            sharding::Fingerprint(model));
}

TEST(DivideByDType, AModelOfOneDTypeStaysAsItIs) {
  ModelSpec model = Block();
  for (ParameterSpec& parameter : model.parameters) parameter.compute = std::nullopt;
  model.parameters[3].compute = DType::kFloat32;
  EXPECT_EQ(sharding::Fingerprint(DivideByDType(model, DType::kFloat32)),
            sharding::Fingerprint(model));
}

TEST(DivideByDType, AnOrderThatCannotBeIsRefusedLater) {
  ModelSpec model = Block();
  model.forward[1].unit = UnitId{9};
  EXPECT_FALSE(Validate(DivideByDType(model, DType::kBFloat16)).ok());
  model = Block();
  model.order = {{.visit = 7}};
  EXPECT_FALSE(Validate(DivideByDType(model, DType::kBFloat16)).ok());
}

}  // namespace
}  // namespace ebb::divide_by_dtype_test
