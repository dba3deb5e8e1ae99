// A checkpoint of three or four ranks is loaded by any number of ranks, at any stage, tier and
// shard group. Masters and states agree to the bit, and each rank has read only the blocks with its
// values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "own_folder.h"
#include "way.h"

namespace ebb::testing::resharding_test {
namespace {

class ReadBlocksTest : public OwnFolderTest {};
class ReshardingTest : public ReadBlocksTest, public ::testing::WithParamInterface<Way> {};
constexpr DType kHalf = DType::kBFloat16;
constexpr OptimizerStates k8Bit = OptimizerStates::k8Bit;
INSTANTIATE_TEST_SUITE_P(
    Savers, ReshardingTest,
    ::testing::Values(Way{.world = 3, .stage = 2}, Way{.world = 4, .stage = 3},
                      Way{.world = 4, .stage = 1, .compute = kHalf},
                      Way{.world = 4, .stage = 3, .tier = Tier::kCpu, .compute = DType::kFloat16},
                      Way{.world = 4, .stage = 3, .tier = Tier::kNvme, .compute = kHalf},
                      Way{.world = 4, .stage = 3, .compute = kHalf, .stochastic_rounding = true},
                      Way{.world = 3, .stage = 3, .compute = kHalf, .own_dtypes = true},
                      Way{.world = 4,
                          .stage = 3,
                          .tier = Tier::kNvme,
                          .compute = kHalf,
                          .stochastic_rounding = true,
                          .own_dtypes = true},
                      Way{.world = 4, .stage = 3, .compute = kHalf, .shard_group = 2},
                      Way{.world = 3, .stage = 2, .states = OptimizerStates::kBFloat16},
                      Way{.world = 4, .stage = 3, .states = k8Bit},
                      Way{.world = 3,
                          .stage = 3,
                          .tier = Tier::kNvme,
                          .compute = kHalf,
                          .stochastic_rounding = true,
                          .own_dtypes = true,
                          .states = k8Bit},
                      Way{.world = 3, .stage = 2, .optimizer = OptimizerType::kMuon},
                      Way{.world = 4,
                          .stage = 3,
                          .tier = Tier::kNvme,
                          .compute = kHalf,
                          .own_dtypes = true,
                          .optimizer = OptimizerType::kMuon}));

// Whole arrays of all ranks, by class or state and parameter.
class WholeState {
 public:
  absl::Status Add(Engine& engine) {
    std::vector<std::string> states = {"", "exp_avg", "exp_avg_sq"};
    if (engine.config().optimizer.type == OptimizerType::kMuon) states.push_back("momentum_buffer");
    for (const std::string& state : states) {
      EBB_RETURN_IF_ERROR(engine.Read(
          state.empty() ? StateClass::kMaster : StateClass::kOptimizer,
          [&](const Slice& slice, std::span<const float> values) {
            const std::scoped_lock lock(mutex_);
            std::vector<float>& all = values_[absl::StrCat(state, " of ", slice.name)];
            all.resize(static_cast<size_t>(Elements(slice.shape)), kMissing);
            std::copy(values.begin(), values.end(), all.begin() + slice.begin);
            return absl::OkStatus();
          },
          state));
    }
    return absl::OkStatus();
  }
  const std::map<std::string, std::vector<float>>& values() const { return values_; }

 private:
  static constexpr float kMissing = -12345;
  std::mutex mutex_;
  std::map<std::string, std::vector<float>> values_;
};

TEST_P(ReshardingTest, GivesEachWorldTheExactMastersAndStates) {
  const Way& saver = GetParam();
  WholeState saved;
  OnWay(saver, [&](Engine& engine, ToyModel& model, int rank) {
    ASSERT_OK(Train(engine, model, rank, 0, 2));
    ASSERT_OK(saved.Add(engine));
    ASSERT_OK(SaveCheckpoint(engine, folder_).status());
  });
  ASSERT_GT(saved.values().size(), 12u);
  const Way kLoaders[] = {{.world = 1, .stage = 0},
                          {.world = 1, .stage = 3, .tier = Tier::kNvme},
                          {.world = 2, .stage = 1, .tier = Tier::kCpu},
                          {.world = 2, .stage = 3, .tier = Tier::kNvme},
                          {.world = 3, .stage = 2},
                          {.world = 4, .stage = 3, .shard_group = 2},
                          {.world = 4, .stage = 3, .hpz = 2},
                          {.world = 8, .stage = 3, .tier = Tier::kCpu}};
  for (Way loader : kLoaders) {
    SCOPED_TRACE(absl::StrCat("world ", loader.world, " stage ", loader.stage));
    loader.compute = saver.compute;
    loader.stochastic_rounding = saver.stochastic_rounding;
    loader.own_dtypes = saver.own_dtypes;
    loader.states = saver.states;
    loader.optimizer = saver.optimizer;
    WholeState loaded;
    OnWay(loader, [&](Engine& engine, ToyModel& model, int rank) {
      ASSERT_OK(LoadCheckpoint(engine, folder_).status());
      ASSERT_OK(loaded.Add(engine));
      ASSERT_OK(Train(engine, model, rank, 2, 3));
    });
    EXPECT_EQ(loaded.values(), saved.values());
  }
}

// States in blocks are stored as they are: a byte for each element, and the scales of blocks.
TEST_F(ReadBlocksTest, StatesInBlocksAreStoredAsCodesAndScales) {
  const Way way{.world = 2, .stage = 3, .states = k8Bit};
  TrainAndSave(way, 2, folder_);
  ASSERT_OK_AND_ASSIGN(const std::string checkpoint, FindCheckpoint(folder_));
  ASSERT_OK_AND_ASSIGN(const RankFileHeader file,
                       ReadRankFileHeader(checkpoint + "/" + RankFileName(0, 2)));
  int64_t codes = 0, scales = 0, numbers = 0;
  for (const StoredTensor& tensor : file.header.tensors) {
    const std::optional<SliceName> slice = ParseSliceName(tensor.name);
    ASSERT_TRUE(slice.has_value()) << tensor.name;
    if (slice->of == "exp_avg.scales") scales += tensor.bytes();
    if (slice->of != "exp_avg") continue;
    EXPECT_EQ(tensor.dtype, slice->end - slice->begin == tensor.bytes() ? "U8" : "F32");
    (tensor.dtype == "U8" ? codes : numbers) += tensor.bytes();
  }
  EXPECT_GT(codes, 0);
  EXPECT_GT(numbers, 0);  // of small parameters
  EXPECT_GE(scales, codes / 256 * 4);
}

// In both directions. Numbers that were codes stay what they are.
TEST_F(ReadBlocksTest, AnyRunLoadsTheStatesOfAnother) {
  constexpr OptimizerStates kAll[] = {OptimizerStates::kFloat32, OptimizerStates::kBFloat16, k8Bit};
  for (const OptimizerStates from : kAll) {
    const std::string folder = absl::StrCat(folder_, "/", static_cast<int>(from));
    WholeState saved;
    OnWay({.world = 2, .stage = 3, .states = from}, [&](Engine& engine, ToyModel& model, int rank) {
      ASSERT_OK(Train(engine, model, rank, 0, 2));
      ASSERT_OK(saved.Add(engine));
      ASSERT_OK(SaveCheckpoint(engine, folder).status());
    });
    for (const OptimizerStates to : kAll) {
      SCOPED_TRACE(absl::StrCat(static_cast<int>(from), " to ", static_cast<int>(to)));
      WholeState loaded;
      OnWay({.world = 3, .stage = 1, .states = to}, [&](Engine& engine, ToyModel& model, int rank) {
        ASSERT_OK(LoadCheckpoint(engine, folder).status());
        ASSERT_OK(loaded.Add(engine));
        ASSERT_OK(Train(engine, model, rank, 2, 3));
      });
      ASSERT_EQ(loaded.values().size(), saved.values().size());
      const bool exact = to == from || to == OptimizerStates::kFloat32;
      for (const auto& [name, values] : saved.values()) {
        const std::vector<float>& other = loaded.values().at(name);
        const float largest =
            std::abs(*std::max_element(values.begin(), values.end(),
                                       [](float a, float b) { return std::abs(a) < std::abs(b); }));
        // Half of the widest gap in a map is 3% of a block's largest number.
        const float apart = exact || name.starts_with(" of ") ? 0 : 0.032f * largest;
        for (size_t i = 0; i < values.size(); ++i)
          ASSERT_NEAR(values[i], other[i], apart) << name << " " << i;
      }
    }
  }
}

// With parameters of several blocks.
TEST_F(ReadBlocksTest, EachRankReadsTheBlocksOfItsOwnValuesOnce) {
  constexpr ToyOptions kLarge = {.layers = 1, .width = 1800, .tied = false, .frozen = false};
  const auto place = [](const StateSlice& slice) {
    return std::pair(slice.state, static_cast<int>(slice.parameter));
  };
  std::mutex mutex;
  std::map<std::pair<std::string, int>, std::vector<StateSlice>> stored;
  OnWay({.world = 4, .stage = 1}, kLarge, [&](Engine& engine, ToyModel&, int) {
    {
      const std::scoped_lock lock(mutex);
      for (const StateSlice& slice : engine.StateSlices()) stored[place(slice)].push_back(slice);
    }
    ASSERT_OK(SaveCheckpoint(engine, folder_).status());
  });
  for (const int world : {1, 2, 3, 8}) {
    SCOPED_TRACE(absl::StrCat("world ", world));
    OnWay({.world = world, .stage = 3}, kLarge, [&](Engine& engine, ToyModel&, int) {
      int64_t needed = 0, blocks = 0;
      for (const StateSlice& own : engine.StateSlices()) {
        needed += (own.end - own.begin) * SizeOf(DType::kFloat32);
        for (const StateSlice& piece : stored.at(place(own))) {
          const int64_t bytes = (piece.end - piece.begin) * SizeOf(DType::kFloat32),
                        from =
                            std::max<int64_t>(own.begin - piece.begin, 0) * SizeOf(DType::kFloat32),
                        to = std::min((own.end - piece.begin) * SizeOf(DType::kFloat32), bytes);
          if (from >= to) continue;
          blocks += std::min(CheckedBlocks(to) * kCheckedBlock, bytes) -
                    from / kCheckedBlock * kCheckedBlock;
        }
      }
      ASSERT_OK_AND_ASSIGN(const LoadedCheckpoint loaded, LoadCheckpoint(engine, folder_));
      EXPECT_GE(loaded.bytes_read, needed);
      EXPECT_EQ(loaded.bytes_read, blocks);
    });
  }
}

}  // namespace
}  // namespace ebb::testing::resharding_test
