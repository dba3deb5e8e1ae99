#include "ebb/sharding/partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "random_model.h"

namespace ebb::sharding::partition_test {
namespace {

using ::testing::HasSubstr;

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
      const Placement& placement = section->placements[i];
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
    const absl::StatusOr<Section> section = Partition(parameters.model, parameters.ids, world);
    ASSERT_TRUE(section.ok()) << section.status();
    ASSERT_EQ(section->shard, LeastShard(parameters, world));
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
    for (const Placement& placement : section->placements) {
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
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("parameter 'p1'"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("more than 5% over 2 ranks"));
}

TEST(Partition, GivesWholeRowGroupsToRanksThatDivideThem) {
  const Parameters parameters = Make({{.name = "", .shape = {12, 320}, .cut_rows = 3}});
  const absl::StatusOr<Section> section = Partition(parameters.model, parameters.ids, 4);
  ASSERT_TRUE(section.ok()) << section.status();
  EXPECT_EQ(section->shard, 3 * 320);
}

TEST(Partition, HugeGroupsOfRowsDoNotOverflow) {
  const Parameters parameters =
      Make({{.name = "", .shape = {4, (int64_t{1} << 50) + 1}, .cut_rows = 3}});
  EXPECT_FALSE(Partition(parameters.model, parameters.ids, 8).ok());
  EXPECT_TRUE(Partition(parameters.model, parameters.ids, 1).ok());
}

TEST(Partition, NoParametersHaveNoCuts) {
  const absl::StatusOr<Section> section = Partition(ModelSpec{}, {}, 3);
  ASSERT_TRUE(section.ok());
  EXPECT_EQ(section->elements, 0);
  EXPECT_EQ(section->shard, 0);
}

}  // namespace
}  // namespace ebb::sharding::partition_test
