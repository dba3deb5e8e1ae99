#include "ebb/sharding/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/interval.h"
#include "random_model.h"
#include "tests/status.h"

namespace ebb::sharding::layout_test {
namespace {

TEST(Layout, HasEveryParameterOnceInItsUnitsSection) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    const ModelSpec& model = random_case.model;
    ASSERT_OK_AND_ASSIGN(const ModelLayout layout, LayOut(model, random_case.world));
    ASSERT_EQ(layout.shards, random_case.world);
    ASSERT_EQ(layout.units.size(), model.units.size());
    std::set<ParameterId> found;
    for (size_t u = 0; u < model.units.size(); ++u) {
      const UnitLayout& unit = layout.units[u];
      for (const Section* section : {&unit.trainable, &unit.frozen}) {
        for (const PlacedParameter& placement : section->placements) {
          ASSERT_TRUE(found.insert(placement.parameter).second);
          ASSERT_EQ(model[placement.parameter].trainable, section == &unit.trainable);
          const ParameterLocation& location =
              layout.parameters[static_cast<size_t>(placement.parameter)];
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
    ASSERT_OK(a);
    ASSERT_OK(b);
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
  EXPECT_THAT(LayOut(model, 2).status(), testing::Says("'experts'"));
  EXPECT_OK(LayOut(model, 1));
}

TEST(Layout, RefusesAWorldWithoutRanks) {
  const ModelSpec model = ModelOf({.name = "w", .shape = {3}, .init = Constant(0)});
  EXPECT_EQ(LayOut(model, 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Layout, ReturnsTheModelsError) {
  const ModelSpec model = ModelOf({.name = "w", .shape = {0}, .init = Constant(0)});
  EXPECT_THAT(LayOut(model, 1).status(), testing::Says("\"w\""));
}

std::vector<Section> SectionsOf(const RandomCase& random_case) {
  const absl::StatusOr<ModelLayout> layout = LayOut(random_case.model, random_case.world);
  EXPECT_OK(layout);
  std::vector<Section> sections;
  for (const UnitLayout& unit : layout->units) {
    if (unit.trainable.elements > 0) sections.push_back(unit.trainable);
    if (unit.frozen.elements > 0) sections.push_back(unit.frozen);
  }
  return sections;
}

TEST(Interval, RanksTileEveryParameter) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    for (const Section& section : SectionsOf(random_case)) {
      std::map<ParameterId, int64_t> covered;  // elements so far, without gap or overlap
      for (int rank = 0; rank < random_case.world; ++rank) {
        for (const Interval& interval : IntervalsOf(section, rank)) {
          ASSERT_LT(interval.begin, interval.end);
          ASSERT_EQ(interval.begin, covered[interval.parameter]);
          covered[interval.parameter] = interval.end;
        }
      }
      for (const PlacedParameter& placement : section.placements)
        ASSERT_EQ(covered[placement.parameter], placement.elements);
    }
  }
}

TEST(Interval, SaysWhichElementIsAtEachOffsetOfARange) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    Random random(seed);
    for (const Section& section : SectionsOf(random_case)) {
      const int64_t begin = random.Between(0, section.elements);
      const int64_t end = random.Between(begin, section.elements);
      int64_t elements = 0;
      for (const Interval& interval : IntervalsIn(section, begin, end)) {
        for (const PlacedParameter& placement : section.placements) {
          if (placement.parameter != interval.parameter) continue;
          ASSERT_EQ(begin + interval.offset, placement.offset + interval.begin);
        }
        ASSERT_GE(interval.offset, 0);
        ASSERT_LE(interval.offset + interval.end - interval.begin, end - begin);
        elements += interval.end - interval.begin;
      }
      int64_t expected = 0;  // all but the padding
      for (const PlacedParameter& placement : section.placements) {
        const int64_t from = std::max(begin, placement.offset);
        expected +=
            std::max<int64_t>(0, std::min(end, placement.offset + placement.elements) - from);
      }
      ASSERT_EQ(elements, expected);
    }
  }
}

TEST(Interval, RespectsRowCuts) {
  int cuts = 0;
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.description());
    for (const Section& section : SectionsOf(random_case)) {
      for (int rank = 0; rank < random_case.world; ++rank) {
        for (const Interval& interval : IntervalsOf(section, rank)) {
          const ParameterSpec& parameter = random_case.model[interval.parameter];
          if (parameter.cut_rows == 0) continue;
          const int64_t row = Elements(parameter.shape) / parameter.shape.front();
          ASSERT_EQ(interval.begin % (parameter.cut_rows * row), 0);
          cuts += interval.begin > 0;
        }
      }
    }
  }
  EXPECT_GT(cuts, 10);
}

TEST(Interval, PaddingHasNoIntervals) {
  const Section section{.placements = {{ParameterId{0}, 0, 10}}, .shard = 64, .elements = 128};
  EXPECT_EQ(IntervalsOf(section, 0).size(), 1u);
  EXPECT_TRUE(IntervalsOf(section, 1).empty());
  EXPECT_TRUE(IntervalsIn(section, 10, 64).empty());
  EXPECT_TRUE(IntervalsIn(section, 5, 5).empty());
}

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct Parameters {
  ModelSpec model;
  std::vector<ParameterId> ids;
};

Parameters Make(std::vector<ParameterSpec> specs) {
  Parameters parameters;
  const UnitId unit = parameters.model.AddUnit("unit");
  for (ParameterSpec& spec : specs) {
    spec.name = absl::StrCat("p", parameters.ids.size());
    parameters.ids.push_back(parameters.model.Add(unit, std::move(spec)));
  }
  return parameters;
}

Parameters RandomParameters(Random& random) {
  std::vector<ParameterSpec> specs(random.Between(1, 6));
  const int64_t elements_max = random.OneOf<int64_t>({60, 2'000, 20'000});
  for (ParameterSpec& spec : specs) spec = RandomParameter(random, elements_max);
  return Make(std::move(specs));
}

int64_t RowBlock(const ParameterSpec& parameter) {
  int64_t block = parameter.cut_rows;
  for (size_t i = 1; i < parameter.shape.size(); ++i) block *= parameter.shape[i];
  return block;
}

// The least aligned slice of `world` without row cuts.
int64_t LeastShard(const Parameters& parameters, int world) {
  int64_t end = 0;
  for (ParameterId id : parameters.ids)
    end = RoundUp(end, kAlignment) + Elements(parameters.model[id].shape);
  return RoundUp(RoundUp(end, world) / world, kAlignment);
}

// Whether no cut at a multiple of `shard` splits a group of rows of a parameter at `start`.
bool CutsBetweenRows(const ParameterSpec& parameter, int64_t start, int64_t shard) {
  if (parameter.cut_rows == 0) return true;
  const int64_t end = start + Elements(parameter.shape);
  for (int64_t cut = shard; cut < end; cut += shard) {
    if (cut > start && (cut - start) % RowBlock(parameter) != 0) return false;
  }
  return true;
}

// The least slice within the 5% for which there is a layout, found by trying every length, and for
// each parameter every place. Taking the first place that works leaves most to the others.
std::optional<int64_t> LeastShardByTrying(const Parameters& parameters, int world) {
  const int64_t least = LeastShard(parameters, world);
  for (int64_t shard = least; 20 * shard <= 21 * least; shard += kAlignment) {
    int64_t end = 0;
    for (ParameterId id : parameters.ids) {
      const ParameterSpec& parameter = parameters.model[id];
      int64_t start = RoundUp(end, kAlignment);
      while (start < shard * world && !CutsBetweenRows(parameter, start, shard))
        start += kAlignment;
      end = start + Elements(parameter.shape);
    }
    if (end <= shard * world) return shard;
  }
  return std::nullopt;
}

TEST(Partition, LaysEveryParameterOnceInOrderAligned) {
  for (int seed = 1; seed <= Cases(1'000); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const Parameters parameters = RandomParameters(random);
    const int world = static_cast<int>(random.Between(1, 8));
    const absl::StatusOr<Section> section = Partition(parameters.model, parameters.ids, world);
    if (!section.ok()) continue;
    ASSERT_EQ(section->placements.size(), parameters.ids.size());
    ASSERT_EQ(section->shard % kAlignment, 0);
    ASSERT_EQ(section->elements, world * section->shard);
    int64_t end = 0;
    for (size_t i = 0; i < parameters.ids.size(); ++i) {
      const PlacedParameter& placement = section->placements[i];
      ASSERT_EQ(placement.parameter, parameters.ids[i]);
      ASSERT_EQ(placement.elements, Elements(parameters.model[parameters.ids[i]].shape));
      ASSERT_EQ(placement.offset % kAlignment, 0);
      ASSERT_GE(placement.offset, end);
      end = placement.offset + placement.elements;
    }
    ASSERT_LE(end, section->elements);
  }
}

TEST(Partition, TakesTheLeastAlignedSliceWhereCutsMayFallAnywhere) {
  for (int seed = 1; seed <= Cases(1'000); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Parameters parameters = RandomParameters(random);
    for (ParameterSpec& parameter : parameters.model.parameters) parameter.cut_rows = 0;
    const int world = static_cast<int>(random.Between(1, 8));
    ASSERT_OK_AND_ASSIGN(const Section section, Partition(parameters.model, parameters.ids, world));
    ASSERT_EQ(section.shard, LeastShard(parameters, world));
  }
}

TEST(Partition, CutsBetweenGroupsOfRows) {
  int with_row_cuts = 0;
  for (int seed = 1; seed <= Cases(1'000); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const Parameters parameters = RandomParameters(random);
    const int world = static_cast<int>(random.Between(1, 8));
    const absl::StatusOr<Section> section = Partition(parameters.model, parameters.ids, world);
    if (!section.ok()) continue;
    for (const PlacedParameter& placement : section->placements) {
      const ParameterSpec& parameter = parameters.model[placement.parameter];
      with_row_cuts += parameter.cut_rows > 0;
      ASSERT_TRUE(CutsBetweenRows(parameter, placement.offset, section->shard)) << parameter.name;
    }
  }
  EXPECT_GT(with_row_cuts, 100);
}

TEST(Partition, RefusesExactlyTheSizesWithoutALayoutWithinFivePercent) {
  int refused = 0;
  for (int seed = 1; seed <= Cases(1'000); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const Parameters parameters = RandomParameters(random);
    const int world = static_cast<int>(random.Between(1, 8));
    const absl::StatusOr<Section> section = Partition(parameters.model, parameters.ids, world);
    const std::optional<int64_t> least = LeastShardByTrying(parameters, world);
    ASSERT_EQ(section.ok(), least.has_value()) << "world " << world << " " << section.status();
    if (section.ok()) {
      ASSERT_EQ(section->shard, *least);
      continue;
    }
    ++refused;
    bool names_one = false;
    for (ParameterId id : parameters.ids) {
      const ParameterSpec& parameter = parameters.model[id];
      names_one |= parameter.cut_rows > 0 &&
                   section.status().message().find(absl::StrCat("'", parameter.name, "'")) !=
                       absl::string_view::npos;
    }
    ASSERT_TRUE(names_one) << section.status();
  }
  EXPECT_GT(refused, 20);
}

TEST(Partition, NamesTheParameterWithRowCutsThatPadTooMuch) {
  const Parameters parameters =
      Make({{.name = "", .shape = {640}}, {.name = "", .shape = {3, 1'000}, .cut_rows = 1}});
  const absl::Status status = Partition(parameters.model, parameters.ids, 2).status();
  EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kInvalidArgument, "parameter 'p1'"));
  EXPECT_THAT(status, testing::Says("more than 5% over 2 ranks"));
}

TEST(Partition, GivesWholeRowGroupsToRanksThatDivideThem) {
  const Parameters parameters = Make({{.name = "", .shape = {12, 320}, .cut_rows = 3}});
  ASSERT_OK_AND_ASSIGN(const Section section, Partition(parameters.model, parameters.ids, 4));
  EXPECT_EQ(section.shard, 3 * 320);
}

TEST(Partition, HugeGroupsOfRowsDoNotOverflow) {
  const Parameters parameters =
      Make({{.name = "", .shape = {4, (int64_t{1} << 50) + 1}, .cut_rows = 3}});
  EXPECT_FALSE(Partition(parameters.model, parameters.ids, 8).ok());
  EXPECT_OK(Partition(parameters.model, parameters.ids, 1));
}

TEST(Partition, NoParametersHaveNoCuts) {
  ASSERT_OK_AND_ASSIGN(const Section section, Partition(ModelSpec{}, {}, 3));
  EXPECT_EQ(section.elements, 0);
  EXPECT_EQ(section.shard, 0);
}

}  // namespace
}  // namespace ebb::sharding::layout_test
