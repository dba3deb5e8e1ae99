#include "ebb/sharding/interruption.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace ebb::sharding {
// Backwards from the end: which cells are read later, and have not been written in between.
std::vector<int> FindToBringAgain(const Cells& cells, const Fragment& fragment, int next) {
  std::vector<uint8_t> is_read(static_cast<size_t>(cells.count()), 0);
  std::vector<CellRange> ranges;
  std::vector<int> again;
  for (int index = static_cast<int>(fragment.instructions.size()); index-- > 0;) {
    const Instruction& instruction = fragment.instructions[static_cast<size_t>(index)];
    const auto for_cells = [&](bool (*touches)(Access), auto visit) {
      ranges.clear();
      for (const Operand& operand : instruction.operands)
        if (touches(operand.access)) cells.Find(operand, ranges);
      for (const auto& [begin, end] : ranges)
        std::for_each(is_read.begin() + begin, is_read.begin() + end, visit);
    };
    bool runs = index >= next;
    // Secondary shards stay: an evaluation does not touch them.
    const bool brings = !runs && instruction.brings_parameters;
    for_cells(Writes, [&](uint8_t& cell) {
      runs |= brings && cell != 0;
      cell = 0;
    });
    if (!runs) continue;
    for_cells(Reads, [](uint8_t& cell) { cell = 1; });
    if (index < next) again.push_back(index);
  }
  std::reverse(again.begin(), again.end());
  return again;
}

std::vector<int> FindCarried(const Fragment& fragment, int next) {
  std::vector<int> carried;
  for (int index = next; index < static_cast<int>(fragment.instructions.size()); ++index)
    if (fragment.instructions[static_cast<size_t>(index)].carried) carried.push_back(index);
  return carried;
}

bool HasCarriedFrom(const Plan& plan, size_t moment) {
  return std::any_of(plan.operations.begin() + plan.moments[moment].begin, plan.operations.end(),
                     [](const Operation& of) { return of.condition == Condition::kCarrying; });
}

}  // namespace ebb::sharding
