
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ebb/sharding/scopes.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::declared_order_test {
namespace {

using ::testing::ElementsAre;

// "F0( R1 B1 F0)": F0 opens, R1 and B1 open and close, F0 closes.
std::vector<ScopeEvent> Events(const char* text) {
  ModelSpec model;
  for (const absl::string_view split : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    const std::string word(split);
    const char end = word.back();
    ScopeEvent event{.opens = end != ')',
                     .backward = word[0] == 'B',
                     .recompute = word[0] == 'R',
                     .visit = std::atoi(word.c_str() + 1)};
    if (end == '(' || end == ')') {
      model.order.push_back(event);
    } else {
      model.AddScope(event);
    }
  }
  return model.order;
}

std::string Written(const std::vector<ScopeEvent>& events) {
  return absl::StrJoin(events, " ", [](std::string* out, const ScopeEvent& event) {
    absl::StrAppend(out,
                    event.backward    ? "B"
                    : event.recompute ? "R"
                                      : "F",
                    event.visit, event.opens ? "(" : ")");
  });
}

// Units 0, 1 and 2, visited in turn.
ModelSpec Chain(const char* order = "", int64_t output_bytes = 0) {
  ModelSpec model = UnitChain({4, 4, 4}, output_bytes);
  model.order = Events(order);
  return model;
}

TEST(DeclaredOrder, WithoutOneIsForwardAndItsReverse) {
  ModelSpec model = Chain();
  EXPECT_EQ(Written(EventsOfRound(model)), Written(Events("F0 F1 F2 B2 B1 B0")));
  model.parameters[0].trainable = false;
  EXPECT_EQ(Written(EventsOfRound(model)), Written(Events("F0 F1 F2 B2 B1")));
  model.parameters[1].trainable = false;
  model.forward.push_back({.unit = UnitId{0}});
  EXPECT_EQ(Written(EventsOfRound(model)), Written(Events("F0 F1 F2 F3 B3 B2")));
}

TEST(DeclaredOrder, VisitsKnowTheirBackwardAndGradients) {
  ModelSpec model = Chain();
  model.forward = {{.unit = UnitId{0}},
                   {.unit = UnitId{1}},
                   {.unit = UnitId{1}, .backward = false},
                   {.unit = UnitId{0}, .gradients = false},
                   {.unit = UnitId{2}, .forward = false}};
  ASSERT_OK(Validate(model));
  EXPECT_EQ(Written(EventsOfRound(model)), Written(Events("F0 F1 F2 F3 B4 B3 B1 B0")));
  EXPECT_THAT(VisitsWithBackward(model), ElementsAre(true, true, false, true, true));
  EXPECT_THAT(VisitsWithGradients(model), ElementsAre(true, true, false, false, true));
}

// "F0 1-4 0": a scope, its ticks and its unit; with a star if it takes gradients.
std::vector<std::string> Described(const std::vector<PlannedScope>& scopes) {
  std::vector<std::string> lines;
  for (const PlannedScope& scope : scopes) {
    constexpr char kKinds[] = {'F', 'B', 'R'};
    lines.push_back(absl::StrCat(std::string(1, kKinds[static_cast<int>(scope.kind())]),
                                 scope.visit, " ", scope.open_tick, "-", scope.close_tick, " ",
                                 scope.unit, scope.gradients ? "*" : ""));
  }
  return lines;
}

TEST(Scopes, HaveTicksAsTheyOpenAndClose) {
  ModelSpec model = Chain("F0( F1 F2 F0) B0( B2 R1 B1 B0)");
  model.parameters[2].trainable = false;
  ASSERT_OK(Validate(model));
  EXPECT_THAT(Described(ScopesOfStep(model, 1)),
              ElementsAre("F0 1-6 0", "F1 2-3 1", "F2 4-5 2", "B0 7-14 0*", "B2 8-9 2",
                          "R1 10-11 1", "B1 12-13 1*"));
  EXPECT_THAT(Described(ScopesOfStep(model, 2))[8], "F1 16-17 1") << "of the second round";
  EXPECT_THAT(Described(ScopesOfWalk(model)), ElementsAre("F0 1-6 0", "F1 2-3 1", "F2 4-5 2"));
}

TEST(Scopes, ListTheEventsOfEachTick) {
  const std::vector<PlannedScope> scopes = ScopesOfStep(Chain("F0( F1 F0) F2 B0( B1 B0) B2"), 2);
  const std::vector<ScopeTick> ticks = TicksOf(scopes);
  ASSERT_EQ(ticks.size(), 2 * scopes.size());
  for (size_t t = 0; t < ticks.size(); ++t) {
    const PlannedScope& scope = scopes[static_cast<size_t>(ticks[t].scope)];
    EXPECT_EQ(ticks[t].opens ? scope.open_tick : scope.close_tick, static_cast<int>(t) + 1);
  }
}

struct Case {
  const char* name;
  const char* order;
  std::vector<std::string> errors = {};  // that the message holds; none: the order is good
  std::function<void(ModelSpec&)> change = [](ModelSpec&) {};
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class CheckOrderTest : public ::testing::TestWithParam<Case> {};

TEST_P(CheckOrderTest, NamesTheEventTheUnitAndTheRemedy) {
  ModelSpec model = Chain(GetParam().order);
  GetParam().change(model);
  const absl::Status status = Validate(model);
  EXPECT_EQ(status.ok(), GetParam().errors.empty()) << status;
  for (const std::string& error : GetParam().errors) EXPECT_THAT(status, testing::Says(error));
}

void Boundaries(ModelSpec& model) {
  for (Visit& visit : model.forward) visit.output_bytes = 8;
}
// Visit 3 is to unit 0.
void Tie(ModelSpec& model) {
  model.forward.push_back({.unit = UnitId{0}});
}

const Case kCases[] = {
    {"InTurn", "F0 F1 F2 B2 B1 B0"},
    {"NestedRoot", "F0( F1 F2 F0) B0( B2 B1 B0)"},
    {"Segment", "F0 F1 F2 B2 R0 R1 B1 B0"},
    {"SegmentOfAll", "F0 F1 F2 R0 R1 R2 B2 B1 B0"},
    {"RecomputedTwice", "F0 F1 F2 B2 R0 R1 B1 R0 B0"},
    {"NestedRecompute", "F0 F1 F2 B2 R0( R1 R0) B1 B0"},
    {"BackwardInForwardsOrder", "F0 F1 F2 B0 B1 B2"},
    {"TwoWalks", "F0 F1 B1 B0 F2 B2"},
    {"ForwardClosesOverOthers", "F0( F1( F0) F1) F2 B2 B1 B0"},
    {"AVisitOutOfRange", "F0 F1 F2 B3 B1 B0", {"event 6", "visit 3", "0 to 2"}},
    {"BackwardAndRecompute",
     "F0 F1 F2 B2 B1 B0",
     {"event 6", "visit 2, to unit 2 (\"unit2\")", "both a backward and a recompute"},
     [](ModelSpec& m) { m.order[6].recompute = true; }},
    {"TwoForwards",
     "F0 F1 F2 F1 B2 B1 B0",
     {"event 6", "opens the forward of visit 1, to unit 1 (\"unit1\")", "event 2",
      "declare a visit for each use"}},
    {"BackwardTwice", "F0 F1 F2 B2 B1 B2 B0", {"event 10", "opens the backward of visit 2"}},
    {"RecomputeOpenTwice",
     "F0 F1 F2 B2 R1( R1( R1) B1 B0",
     {"event 9", "the recompute of visit 1", "event 8", "close it before"}},
    {"ClosesWhatIsNotOpen", "F0 F1) F1 F2 B2 B1 B0", {"event 2", "closes the forward of visit 1"}},
    {"StaysOpen",
     "F0( F1 F2 B2 B1",
     {"event 0", "opens the forward of visit 0, to unit 0 (\"unit0\")", "no event closes"}},
    {"BackwardBeforeForward",
     "F0 F1 B2 F2 B1 B0",
     {"event 4", "opens the backward of visit 2", "before its forward has closed"}},
    {"BackwardInsideForward", "F0 F1 F2( B2 F2) B1 B0", {"event 5", "before its forward"}},
    {"RecomputeBeforeForward", "F0 F1 R2 F2 B2 B1 B0", {"event 4", "inside backward"}},
    {"RecomputeBehindBackward", "F0 F1 F2 B2 R2 B1 B0", {"event 8", "behind its backward"}},
    {"RecomputeOpenInBackward",
     "F0 F1 F2 B2 R1( B1 R1) B0",
     {"event 9", "while its recompute is open, since event 8"}},
    {"RecomputeThatNoBackwardFollows",
     "F0 F1 F2 B2 B1 R0",
     {"event 10", "the recompute of visit 0", "no backward follows"},
     [](ModelSpec& m) { m.parameters[0].trainable = false; }},
    {"ForwardMissing",
     "F0 F2 B2 B1 B0",
     {"never opens the forward of visit 1, to unit 1 (\"unit1\")", "Visit::forward"},
     [](ModelSpec& m) { m.order.erase(m.order.begin() + 6, m.order.begin() + 8); }},
    {"BackwardMissing",
     "F0 F1 F2 B2 B0",
     {"never opens the backward of visit 1, to unit 1 (\"unit1\")", "Visit::backward"}},
    {"BackwardOfAFrozenUnitMayMiss",
     "F0 F1 F2 B2 B0",
     {},
     [](ModelSpec& m) { m.parameters[1].trainable = false; }},
    {"ForwardThatIsNotThere",
     "F0 F1 F2 B2 B1 B0",
     {"event 4", "Visit::forward is false"},
     [](ModelSpec& m) { m.forward[2].forward = false; }},
    {"BackwardThatIsNotThere",
     "F0 F1 F2 B2 B1 B0",
     {"event 8", "Visit::backward is false"},
     [](ModelSpec& m) { m.forward[1].backward = false; }},
    {"HeadWithoutForward",
     "F0 F1 B2 B1 B0",
     {},
     [](ModelSpec& m) { m.forward[2].forward = false; }},
    {"TwoGradientsOfAUnitAtOnce",
     "F0 F1 F2 F3 B0( B3 B2 B1 B0)",
     {"event 9", "the backward of visit 3, to unit 0", "event 8", "visit 0", "Visit::gradients"},
     Tie},
    {"OneOfTwoTakesThem",
     "F0 F1 F2 F3 B0( B3 B2 B1 B0)",
     {},
     [](ModelSpec& m) { Tie(m), m.forward[3].gradients = false; }},
    {"UnitWithoutGradients",
     "",
     {"unit 1 (\"unit1\") is trainable", "none of its visits", "ParameterSpec::trainable"},
     [](ModelSpec& m) { m.forward[1].gradients = false; }},
    {"TheLastBackwardDoesNotTakeThem",
     "",
     {"a round opens the backward of visit 0, to unit 0 (\"unit0\") behind the backward of visit 3",
      "Visit::gradients"},
     [](ModelSpec& m) { Tie(m), m.forward[0].gradients = false; }},
    {"ForwardBehindTheLastGradient",
     "F0 F1 F2 B2 B1 B0 F3",
     {"event 12", "the forward of visit 3", "behind the backward of visit 0"},
     [](ModelSpec& m) { Tie(m), m.forward[3].backward = false; }},
    {"BoundariesAndARecompute", "F0 F1 F2 B2 R0 R1 B1 B0", {}, Boundaries},
    {"BoundariesAndANestedScope",
     "F0( F1 F0) F2 B2 B1 B0",
     {"event 1", "the forward of visit 1", "visit 0, to unit 0 (\"unit0\") is open, since event 0",
      "Visit::output_bytes"},
     Boundaries},
    {"BoundariesOutOfTurn",
     "F1 F0 F2 B2 B1 B0",
     {"event 0", "the forward of visit 1", "in the order of ModelSpec::forward"},
     Boundaries},
    {"BoundariesWithBackwardOutOfTurn",
     "F0 F1 F2 B2 B0 B1",
     {"event 10", "the backward of visit 1", "reverse order"},
     Boundaries},
    {"BoundariesWithAHoleInForward",
     "",
     {"visit 1, to unit 1 (\"unit1\") has no forward", "Visit::forward"},
     [](ModelSpec& m) { Boundaries(m), m.forward[1].forward = false; }},
    {"BoundariesWithAHoleInBackward",
     "",
     {"visit 0, to unit 0 (\"unit0\") has a backward and visit 1 has none", "Visit::backward"},
     [](ModelSpec& m) {
       Boundaries(m), m.forward[1].backward = false, m.parameters[1].trainable = false;
     }},
};
INSTANTIATE_TEST_SUITE_P(Orders, CheckOrderTest, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ebb::sharding::declared_order_test
