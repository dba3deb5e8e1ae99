// A step goes on after an evaluation with the same data. Its memory is modelled as one number for
// each cell, which stands for its writer and the contents that the writer read.
#include "ebb/sharding/interruption.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "absl/hash/hash.h"
#include "random_model.h"

namespace ebb::sharding::interruption_test {
namespace {

class CellMemory {
 public:
  explicit CellMemory(const Cells& cells)
      : cells_(cells), contents_(static_cast<size_t>(cells.count()), 0) {}

  void Run(const Instruction& instruction) {
    uint64_t content = absl::HashOf(instruction.role);
    ForEach(instruction, Reads,
            [&](size_t cell) { content = absl::HashOf(content, contents_[cell]); });
    Write(instruction, content);
  }
  // As another fragment does. Secondary shards stay, because it has the same parameters.
  void Overwrite(const Instruction& instruction) {
    if (instruction.role != OperationKind::kFillSecondary) Write(instruction, kOther);
  }
  template <class Visit>
  void ForEach(const Instruction& instruction, bool (*touches)(Access), Visit visit) const {
    std::vector<CellRange> ranges;
    for (const Operand& operand : instruction.operands) {
      if (touches(operand.access) && operand.place.pool != StateClass::kControl)
        cells_.Find(operand, ranges);
    }
    for (const auto& [begin, end] : ranges)
      for (int cell = begin; cell < end; ++cell) visit(static_cast<size_t>(cell));
  }
  uint64_t operator[](size_t cell) const { return contents_[cell]; }

 private:
  static constexpr uint64_t kOther = 1;
  void Write(const Instruction& instruction, uint64_t content) {
    ForEach(instruction, Writes, [&](size_t cell) { contents_[cell] = content; });
  }

  const Cells& cells_;
  std::vector<uint64_t> contents_;
};

// Cells that the rest of the fragment reads with their contents at `next`.
std::vector<size_t> FindExpected(const CellMemory& memory, const Fragment& fragment, int next,
                                 int cells) {
  std::vector<uint8_t> is_written(static_cast<size_t>(cells), 0);
  std::vector<size_t> expected;
  for (const Instruction& instruction : std::span(fragment.instructions).subspan(next)) {
    memory.ForEach(instruction, Reads, [&](size_t cell) {
      if (!is_written[cell]) expected.push_back(cell);
    });
    memory.ForEach(instruction, Writes, [&](size_t cell) { is_written[cell] = 1; });
  }
  return expected;
}

TEST(Interruption, BringsAgainTheDataThatTheRestOfAStepReads) {
  constexpr int kMoments = 4;  // of each case
  int64_t brought = 0;
  for (int number = 1; number <= Cases(200); ++number) {
    const RandomCase random_case(static_cast<uint64_t>(number), /*offloads=*/number % 2 == 0,
                                 /*orders=*/number % 3 == 0);
    SCOPED_TRACE(random_case.description());
    const Plan step = *PlanStep(random_case.inputs()), walk_plan = *PlanWalk(random_case.inputs());
    const Fragment fragment = Lower(step, /*carrying=*/false),
                   walk = Lower(walk_plan, /*carrying=*/false);
    const Fragment* const all[] = {&fragment, &walk};
    const Cells cells(all, step);
    Random random(random_case.seed);
    for (int i = 0; i < kMoments; ++i) {
      const auto at = static_cast<size_t>(random.Between(1, std::ssize(fragment.moments) - 1));
      // Between scopes, and where no boundary of the engine's is under way.
      const bool is_open = fragment.moments[at - 1].kernels >= 0;
      const bool has_boundaries = step.pools.bytes[static_cast<int>(StateClass::kActivation)] > 0;
      if (is_open || has_boundaries) continue;
      const int next = fragment.moments[at].begin;
      CellMemory memory(cells);
      for (int index = 0; index < next; ++index)
        memory.Run(fragment.instructions[static_cast<size_t>(index)]);
      const CellMemory before = memory;
      for (const Instruction& instruction : walk.instructions) memory.Overwrite(instruction);
      for (const int index : FindToBringAgain(cells, fragment, next)) {
        memory.Run(fragment.instructions[static_cast<size_t>(index)]);
        ++brought;
      }
      for (const size_t cell : FindExpected(memory, fragment, next, cells.count()))
        ASSERT_EQ(memory[cell], before[cell]) << "before instruction " << next;
    }
  }
  EXPECT_GT(brought, 0);
}

TEST(Interruption, AStepWithoutPrefetchHasNothingToBringAgainBetweenScopes) {
  for (int number = 1; number <= Cases(50); ++number) {
    RandomCase random_case(static_cast<uint64_t>(number));
    random_case.config.zero.stage = 3;
    random_case.config.ebb.prefetch_depth = 0;
    random_case.config.ebb.reshard_after_forward = true;
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> step = PlanStep(random_case.inputs());
    if (!step.ok()) continue;
    const Fragment fragment = Lower(*step, /*carrying=*/false);
    const Fragment* const all[] = {&fragment};
    const Cells cells(all, *step);
    EXPECT_TRUE(FindToBringAgain(cells, fragment, fragment.moments.front().end).empty());
    EXPECT_TRUE(FindToBringAgain(cells, fragment, fragment.moments.back().begin).empty());
  }
}

}  // namespace
}  // namespace ebb::sharding::interruption_test
