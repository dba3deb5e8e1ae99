// Where the elements of a rank's slice live, and the operations that move them: of random plans,
// against the layout itself.
#include "ebb/sharding/state_pieces.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "random_model.h"
#include "tests/status.h"

namespace ebb::sharding::state_pieces_test {
namespace {

constexpr int kPlans = 60;
constexpr Place kStaging = {.tier = Tier::kCpu, .pool = StateClass::kWorkspace, .offset = 1 << 30};

struct Asked {
  StateArray array;
  int64_t shard = 0;
  std::string name;
};

// All arrays of a plan with slices that hold anything.
std::vector<Asked> ArraysOf(const Plan& plan) {
  const Decisions& d = plan.decisions;
  std::vector<Asked> arrays;
  const auto add = [&](const StateArray& array) {
    const int64_t shard = SectionOf(plan, array.unit, array.trainable).shard;
    if (shard > 0)
      arrays.push_back(
          {array, shard, std::string(Name(array.what)) + " of unit " + std::to_string(array.unit)});
  };
  for (int unit = 0; unit < static_cast<int>(plan.layout.units.size()); ++unit) {
    add({.what = StateClass::kParameter, .unit = unit, .trainable = false});
    for (const StateClass what :
         {StateClass::kParameter, StateClass::kMaster, StateClass::kGradient})
      add({.what = what, .unit = unit});
    for (int state = 0; state < d.optimizer_states; ++state)
      add({.what = StateClass::kOptimizer, .unit = unit, .state = state});
  }
  return arrays;
}

template <class Check>
void OnPlans(Check check) {
  for (int i = 0; i < Cases(kPlans); ++i) {
    RandomCase random(static_cast<uint64_t>(i), /*offloads=*/i % 3 != 0);
    if (i % 3 != 1) random.EncodeStates();
    SCOPED_TRACE(random.description());
    ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random.inputs()));
    for (const int shard : {0, plan.decisions.shards - 1}) {
      for (const Asked& asked : ArraysOf(plan)) {
        SCOPED_TRACE(asked.name);
        check(plan, shard, asked);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

// Elements of a block of the array; 1: it has none.
int64_t BlockOf(const Plan& plan, const StateArray& array) {
  if (array.what != StateClass::kOptimizer) return 1;
  return std::max<int64_t>(1, plan.decisions.state_encoding(array.unit, array.state).block);
}

std::vector<int64_t> CutsOf(int64_t shard, int64_t block) {
  std::vector<int64_t> cuts = {0, shard / 3, shard / 2 + 1, shard};
  for (int64_t& cut : cuts) cut = std::min(cut / block * block, shard);
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

// However an array is cut, each element has one place, and the same.
TEST(StatePieces, RunsCoverTheRequestOnceForAnyCut) {
  OnPlans([](const Plan& plan, int shard, const Asked& asked) {
    const auto placement_of = [&](int64_t begin, int64_t end) {
      std::vector<std::tuple<int64_t, Operand, Operand>> places;
      int64_t at = begin;
      for (const StateRun& run : RunsOf(plan, shard, {asked.array, begin, end})) {
        EXPECT_EQ(run.begin, at);
        EXPECT_LE(run.count(), kRunElements);
        EXPECT_EQ(run.stored[0].count, run.count());
        const int64_t block = BlockOf(plan, asked.array);
        EXPECT_EQ(run.has_scales(), block > 1);
        EXPECT_EQ(run.stored[1].count, run.is_split() ? run.count()
                                       : block > 1    ? (run.count() + block - 1) / block
                                                      : 0);
        const int64_t stride = std::max<int64_t>(1, run.count() / 7);
        at = run.end;
        for (int64_t element = run.begin; element < run.end; element += stride) {
          Operand stored_at[2];
          for (int part = 0; part < 2; ++part) {
            const Operand& stored = run.stored[static_cast<size_t>(part)];
            if (stored.count == 0) continue;
            const int64_t index =
                (element - run.begin) / (part == 1 && run.has_scales() ? block : 1);
            stored_at[part] = {.place = stored.place.Plus(index * stored.encoding.code_bytes()),
                               .encoding = stored.encoding};
          }
          places.emplace_back(element, stored_at[0], stored_at[1]);
        }
      }
      EXPECT_EQ(at, end);
      return places;
    };
    std::map<int64_t, std::pair<Operand, Operand>> whole;
    for (const auto& [element, first, second] : placement_of(0, asked.shard))
      whole[element] = {first, second};
    const std::vector<int64_t> cuts = CutsOf(asked.shard, BlockOf(plan, asked.array));
    for (size_t i = 1; i < cuts.size(); ++i) {
      for (const auto& [element, first, second] : placement_of(cuts[i - 1], cuts[i])) {
        const auto found = whole.find(element);
        if (found == whole.end()) continue;
        EXPECT_EQ(found->second.first, first);
        EXPECT_EQ(found->second.second, second);
      }
    }
  });
}

// StatePlacement are within the pools and files that the plan has, of masters together with their
// other half.
TEST(StatePieces, PlacesAreWithinTheirPools) {
  OnPlans([](const Plan& plan, int shard, const Asked& asked) {
    for (const StateRun& run : RunsOf(plan, shard, {asked.array, 0, asked.shard})) {
      for (const Operand& stored : run.stored) {
        const int64_t pool = plan.table.bytes.Of(stored.place.tier, stored.place.pool);
        const int64_t end = stored.place.offset + shard * stored.place.per_slice + stored.bytes();
        EXPECT_GE(stored.place.offset, 0);
        if (stored.count == 0) continue;
        if (stored.place.tier == Tier::kNvme) {
          EXPECT_EQ(stored.place.per_slice, 0);
          EXPECT_GT(pool, 0);
        } else {
          EXPECT_LE(end, pool);
        }
      }
      EXPECT_EQ(run.is_split(),
                asked.array.what == StateClass::kMaster && plan.decisions.split_master);
    }
  });
}

// Whole blocks of files, within the staging, that hold the values where the host looks for them.
TEST(StatePieces, StagedDataPassesInWholeBlocks) {
  int64_t staged = 0, edges = 0, joined = 0;
  OnPlans([&](const Plan& plan, int shard, const Asked& asked) {
    const std::vector<int64_t> cuts = CutsOf(asked.shard, BlockOf(plan, asked.array));
    for (size_t i = 1; i < cuts.size(); ++i) {
      for (const StateRun& run : RunsOf(plan, shard, {asked.array, cuts[i - 1], cuts[i]})) {
        for (const bool reaches_device : {true, false}) {
          const StagedRun found(run, kStaging, reaches_device);
          const OpList read = LowerStateRead(found), write = LowerStateWrite(found);
          ASSERT_EQ(read.ops.size(), write.ops.size());
          ASSERT_EQ(read.ops.empty(), !found.is_staged());
          EXPECT_TRUE(read.of_state && write.of_state);
          size_t next = 0;
          for (size_t part = 0; part < 2; ++part) {
            const Operand& stored = run.stored[part];
            if (stored.count == 0) continue;
            const bool in_file = stored.place.tier == Tier::kNvme;
            EXPECT_EQ(found.staged[part],
                      in_file || (stored.place.tier == Tier::kDevice && !reaches_device));
            if (!found.staged[part]) {
              EXPECT_EQ(found.host[part], stored.place);
              continue;
            }
            ++staged;
            if (found.joined) next = 0;
            const Op &reads = read.ops[next], &writes = write.ops[next];
            ++next;
            EXPECT_EQ(reads.role, in_file ? Role::kRead : Role::kDownload);
            EXPECT_EQ(writes.role, in_file ? Role::kWrite : Role::kUpload);
            ASSERT_EQ(reads.operands.size(), 2u);
            const Operand &from = reads.operands[0], &to = reads.operands[1];
            EXPECT_EQ(from.access, Access::kRead);
            EXPECT_EQ(to.access, Access::kWrite);
            EXPECT_EQ(from.bytes(), to.bytes());
            const int64_t skipped = stored.place.offset - from.place.offset;
            EXPECT_EQ(found.host[part], to.place.Plus(skipped));
            EXPECT_GE(skipped, 0);
            EXPECT_GE(from.bytes(), skipped + stored.bytes());
            EXPECT_GE(to.place.offset, kStaging.offset);
            EXPECT_LE(to.place.offset + to.bytes(), kStaging.offset + kStateStagingBytes);
            if (in_file) {
              EXPECT_EQ(from.place.offset % kSwapAlignment, 0);
              EXPECT_EQ(to.place.offset % kSwapAlignment, 0);
              EXPECT_EQ(from.bytes() % kSwapAlignment, 0);
              EXPECT_TRUE(found.joined || from.bytes() < skipped + stored.bytes() + kSwapAlignment);
            } else {
              EXPECT_EQ(from.bytes(), stored.bytes());
            }
            EXPECT_EQ(writes.operands[0].place, to.place);
            EXPECT_EQ(writes.operands[1].place, from.place);
            EXPECT_EQ(writes.operands[0].access, Access::kRead);
            EXPECT_EQ(writes.operands[1].access, Access::kWrite);
          }
          // Otherwise the two do not share staging.
          joined += found.joined ? 1 : 0;
          if (found.staged[0] && found.staged[1] && !found.joined) {
            const Operand &first = read.ops[0].operands[1], &second = read.ops[1].operands[1];
            EXPECT_LE(first.place.offset + first.bytes(), second.place.offset);
          }
          // For a write, exactly the blocks that it covers in part.
          int64_t partial = 0, read_before = 0;
          std::map<std::pair<bool, int64_t>, int64_t> covered;  // bytes, by file and block
          for (const Operand& stored : run.stored) {
            if (stored.count == 0 || stored.place.tier != Tier::kNvme) continue;
            const int64_t begin = stored.place.offset, end = begin + stored.bytes();
            for (int64_t block = begin / kSwapAlignment; block * kSwapAlignment < end; ++block) {
              covered[{stored.place.pool == StateClass::kParameter, block}] +=
                  std::min(end, (block + 1) * kSwapAlignment) -
                  std::max(begin, block * kSwapAlignment);
            }
          }
          for (const auto& [block, bytes] : covered) partial += bytes < kSwapAlignment ? 1 : 0;
          for (const Op& op : LowerStateEdges(found).ops) {
            EXPECT_EQ(op.role, Role::kRead);
            for (size_t k = 0; k < op.operands.size(); k += 2) {
              const Operand &from = op.operands[k], &to = op.operands[k + 1];
              EXPECT_EQ(from.bytes(), kSwapAlignment);
              ++read_before;
              const size_t part = run.is_split() && from.place.pool != run.stored[0].place.pool;
              const Operand& stored = run.stored[part];
              EXPECT_EQ(to.place.offset - found.host[part].offset,
                        from.place.offset - stored.place.offset);
            }
          }
          EXPECT_EQ(read_before, partial);
          edges += partial;
        }
      }
    }
  });
  EXPECT_GT(staged, 0);
  EXPECT_GT(joined, 0);
  EXPECT_GT(edges, 0);
}

// The slot of a run of the most elements is full but for less than a cut, of any dtype, however it
// lies in its blocks.
TEST(StatePieces, TheLongestRunFitsItsSlot) {
  constexpr int64_t kInBlock = kSwapAlignment - 4;
  const auto fits = [](const StateRun& run) {
    const OpList read = LowerStateRead(StagedRun(run, kStaging, true));
    const Operand& last = read.ops.back().operands[1];
    return last.place.offset + last.bytes() <= kStaging.offset + kStateStagingBytes;
  };
  const auto at = [](StateClass pool, Encoding encoding) {
    return Operand{.place = {.tier = Tier::kNvme, .pool = pool, .offset = kInBlock},
                   .encoding = encoding,
                   .count = kRunElements};
  };
  EXPECT_TRUE(fits({.end = kRunElements, .stored = {at(StateClass::kMaster, DType::kFloat32)}}));
  EXPECT_TRUE(fits({.end = kRunElements,
                    .stored = {at(StateClass::kParameter, DType::kBFloat16),
                               at(StateClass::kMaster, kLowHalves)}}));
}

// Units that ranks keep whole are gathered from slices that lie within them.
TEST(StatePieces, SpreadsGoFromSlicesToWholeUnits) {
  int gathers = 0;
  for (int i = 0; i < Cases(kPlans); ++i) {
    RandomCase random(static_cast<uint64_t>(i));
    if (i % 3 == 0) random.EncodeStates();
    SCOPED_TRACE(random.description());
    const Plan plan = PlanStep(random.inputs()).value();
    const Decisions& d = plan.decisions;
    for (int unit = 0; unit < static_cast<int>(plan.layout.units.size()); ++unit) {
      const int64_t shard = SectionOf(plan, unit, true).shard;
      const OpList spread =
          LowerSpread(plan, unit, {.masters = true, .parameters = true, .states = true});
      int64_t arrays = 0;
      for (const Op& op : spread.ops) {
        ++gathers;
        EXPECT_EQ(op.role, Role::kRefresh);
        EXPECT_EQ(op.parts.front().unit, unit);
        for (size_t k = 0; k < op.operands.size(); k += 2) {
          ++arrays;
          const Operand &slice = op.operands[k], &whole = op.operands[k + 1];
          EXPECT_EQ(slice.encoding.dtype, op.operands[0].encoding.dtype);
          EXPECT_EQ(slice.place.offset, whole.place.offset);
          EXPECT_EQ(slice.place.per_slice, slice.bytes());
          EXPECT_EQ(whole.bytes(), d.shards * slice.bytes());
        }
      }
      const bool kept = d.kept_whole[static_cast<size_t>(unit)];
      const int sections = (shard > 0) + (SectionOf(plan, unit, false).shard > 0);
      int64_t states = 0;  // codes and scales are gathered apart
      for (int k = 0; k < d.optimizer_states; ++k)
        states += d.state_encoding(unit, k).block > 0 ? 2 : 1;
      const int64_t of_states = d.stage == 0 && shard > 0 ? d.keeps_master(unit) + states : 0;
      EXPECT_EQ(arrays, of_states + (kept ? sections : 0));
      EXPECT_TRUE(LowerSpread(plan, unit, {}).ops.empty());
    }
  }
  EXPECT_GT(gathers, 0);
}

}  // namespace
}  // namespace ebb::sharding::state_pieces_test
