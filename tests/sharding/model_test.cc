// Model specifications: the ones that Validate accepts, and its messages about the others.
#include "ebb/sharding/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "tests/status.h"

namespace ebb::model_test {
namespace {

using ::testing::ElementsAre;

constexpr ParameterId kWeight{0}, kBias{1}, kScale{2};
constexpr UnitId kEmbedding{0}, kBlock{1};

// Two units, three parameters, the first unit tied: visited first and last.
ModelSpec TiedModel() {
  ModelSpec model;
  const UnitId embedding = model.AddUnit("embedding");
  const UnitId block = model.AddUnit("block");
  model.Add(embedding, {.name = "embedding.weight", .shape = {16, 4}, .init = Constant(0)});
  model.Add(block, {.name = "block.bias", .shape = {4}, .init = Constant(0)});
  model.Add(block, {.name = "block.scale", .shape = {}, .init = Constant(1)});
  model.forward = {{.unit = embedding}, {.unit = block}, {.unit = embedding}};
  return model;
}

TEST(ModelSpec, ReturnsTheIdsOfNewUnitsAndParameters) {
  const ModelSpec model = TiedModel();
  EXPECT_EQ(model[kEmbedding].name, "embedding");
  EXPECT_EQ(model[kBlock].name, "block");
  EXPECT_THAT(model[kEmbedding].parameters, ElementsAre(kWeight));
  EXPECT_THAT(model[kBlock].parameters, ElementsAre(kBias, kScale));
  EXPECT_EQ(model[kBias].name, "block.bias");
}

TEST(ModelSpec, CountsElements) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Elements({}), 1);
  EXPECT_EQ(Elements(std::vector<int64_t>{2, 3, 4}), 24);
  EXPECT_EQ(Elements(std::vector<int64_t>{kMost}), kMost);
  EXPECT_EQ(Elements(std::vector<int64_t>{int64_t{1} << 40, int64_t{1} << 40}), kMost);
}

struct Case {
  std::string name;
  std::function<void(ModelSpec&)> change;
  std::vector<std::string> says;  // parts of the message; none: the model is accepted
};
void PrintTo(const Case& test, std::ostream* out) {
  *out << test.name;
}

class Validation : public ::testing::TestWithParam<Case> {};

TEST_P(Validation, AcceptsOrNamesTheFault) {
  ModelSpec model = TiedModel();
  GetParam().change(model);
  const absl::Status status = Validate(model);
  if (GetParam().says.empty()) {
    EXPECT_OK(status);
    return;
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  for (const std::string& part : GetParam().says) EXPECT_THAT(status, testing::Says(part));
}

// Sets the output_bytes of the three visits.
std::function<void(ModelSpec&)> Boundaries(int64_t first, int64_t second, int64_t last) {
  return [=](ModelSpec& model) {
    model.forward[0].output_bytes = first;
    model.forward[1].output_bytes = second;
    model.forward[2].output_bytes = last;
  };
}

const int64_t kHuge = int64_t{1} << 52;

const Case kCases[] = {
    {"AsItIs", [](ModelSpec&) {}, {}},
    {"NothingTrainable",
     [](ModelSpec& m) {
       for (ParameterSpec& p : m.parameters) p.trainable = false;
     },
     {}},
    {"UnitVisitedTwiceInARow", [](ModelSpec& m) { m.forward.push_back({.unit = kEmbedding}); }, {}},
    {"CutRowsBeyondTheRows", [](ModelSpec& m) { m.parameters[0].cut_rows = 100; }, {}},
    {"DuplicateParameterName",
     [](ModelSpec& m) { m.parameters[2].name = "block.bias"; },
     {"parameter 2 (\"block.bias\")", "parameter 1"}},
    {"EmptyParameterName",
     [](ModelSpec& m) { m.parameters[1].name = ""; },
     {"parameter 1", "empty"}},
    {"DuplicateUnitName",
     [](ModelSpec& m) { m.units[1].name = "embedding"; },
     {"unit 1 (\"embedding\")", "unit 0"}},
    {"EmptyUnitName", [](ModelSpec& m) { m.units[0].name = ""; }, {"unit 0", "empty"}},
    {"DimensionZero",
     [](ModelSpec& m) {
       m.parameters[0].shape = {16, 0};
     },
     {"parameter 0 (\"embedding.weight\")", "dimension 1", "[16, 0]"}},
    {"DimensionNegative",
     [](ModelSpec& m) { m.parameters[1].shape = {-4}; },
     {"parameter 1 (\"block.bias\")", "dimension 0", "[-4]"}},
    {"NoInitialiser",
     [](ModelSpec& m) { m.parameters[1].init = nullptr; },
     {"parameter 1 (\"block.bias\")", "initialiser"}},
    {"CutRowsNegative",
     [](ModelSpec& m) { m.parameters[0].cut_rows = -1; },
     {"parameter 0 (\"embedding.weight\")", "cut_rows is -1"}},
    {"CutRowsOfAScalar",
     [](ModelSpec& m) { m.parameters[2].cut_rows = 1; },
     {"parameter 2 (\"block.scale\")", "scalar"}},
    {"OneParameterTooLarge",
     [](ModelSpec& m) {
       m.parameters[0].shape = {int64_t{1} << 40, int64_t{1} << 40};
     },
     {"parameter 0 (\"embedding.weight\")", "2^53 elements"}},
    {"ParametersTooLargeTogether",
     [](ModelSpec& m) {
       m.parameters[0].shape = {kHuge};
       m.parameters[1].shape = {kHuge};
     },
     {"parameter 2 (\"block.scale\")", "2^53 elements"}},
    {"NoUnits", [](ModelSpec& m) { m = {}; }, {"no units"}},
    {"EmptyUnit", [](ModelSpec& m) { m.AddUnit("head"); }, {"unit 2 (\"head\")", "no parameters"}},
    {"ParameterIdOutOfRange",
     [](ModelSpec& m) { m.units[1].parameters.push_back(ParameterId{3}); },
     {"unit 1 (\"block\")", "parameter 3", "0 to 2"}},
    {"ParameterIdNegative",
     [](ModelSpec& m) { m.units[1].parameters.push_back(ParameterId{-1}); },
     {"unit 1 (\"block\")", "parameter -1"}},
    {"ParameterInTwoUnits",
     [](ModelSpec& m) { m.units[1].parameters.push_back(kWeight); },
     {"parameter 0 (\"embedding.weight\")", "unit 0 (\"embedding\")", "unit 1 (\"block\")"}},
    {"ParameterTwiceInAUnit",
     [](ModelSpec& m) { m.units[1].parameters.push_back(kBias); },
     {"parameter 1 (\"block.bias\")", "unit 1 (\"block\")"}},
    {"ParameterInNoUnit",
     [](ModelSpec& m) { m.units[1].parameters.pop_back(); },
     {"parameter 2 (\"block.scale\")", "no unit"}},
    {"ParameterAddedToAUnitThatIsNotThere",
     [](ModelSpec& m) { m.Add(UnitId{7}, {.name = "lost", .shape = {1}, .init = Constant(0)}); },
     {"parameter 3 (\"lost\")", "no unit"}},
    {"UnitNeverVisited",
     [](ModelSpec& m) { m.forward = {{.unit = kEmbedding}}; },
     {"unit 1 (\"block\")", "never visited"}},
    {"VisitOutOfRange",
     [](ModelSpec& m) { m.forward.push_back({.unit = UnitId{2}}); },
     {"visit 3", "unit 2", "0 to 1"}},
    {"VisitNegative", [](ModelSpec& m) { m.forward[1].unit = UnitId{-1}; }, {"visit 1", "unit -1"}},
    {"WorkspaceNegative", [](ModelSpec& m) { m.workspace_bytes = -1; }, {"workspace_bytes is -1"}},
    {"UntouchedNegative",
     [](ModelSpec& m) { m.workspace_untouched_bytes = -1; },
     {"workspace_untouched_bytes is -1; it must be 0 to workspace_bytes"}},
    {"UntouchedBeyondTheWorkspace",
     [](ModelSpec& m) { m.workspace_bytes = 7, m.workspace_untouched_bytes = 8; },
     {"workspace_untouched_bytes is 8; it must be 0 to workspace_bytes, 7"}},
    {"AllBoundariesButTheLast", Boundaries(8, 8, 0), {}},
    {"AllBoundaries", Boundaries(8, 4, 8), {}},
    {"BoundaryMissingFirst", Boundaries(0, 8, 0), {"visit 0", "unit 0 (\"embedding\")", "chain"}},
    {"BoundaryMissingInTheMiddle", Boundaries(8, 0, 8), {"visit 1", "unit 1 (\"block\")", "chain"}},
    {"BoundaryOfTheLastVisitOnly", Boundaries(0, 0, 8), {"visit 0", "chain"}},
    {"BoundaryNegative", Boundaries(8, -8, 0), {"visit 1", "unit 1 (\"block\")", "-8"}},
    {"BoundariesTooLarge", Boundaries(kHuge, kHuge, 1), {"visit 2", "2^53 bytes"}},
    {"OneVisitWithABoundary",
     [](ModelSpec& m) {
       m = {};
       m.Add(m.AddUnit("only"), {.name = "w", .shape = {2}, .init = Constant(0)});
       m.forward = {{.unit = UnitId{0}, .output_bytes = 8}};
     },
     {}},
};

INSTANTIATE_TEST_SUITE_P(Models, Validation, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ebb::model_test
