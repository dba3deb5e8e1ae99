// The waits of an operation follow from its operands: it waits for every earlier operation in
// conflict with it. Two are in conflict if they touch the same bytes and one of them writes. A wait
// that streams and other waits guarantee anyway is left out.
//
// Bytes are counted in cells: the pools and files, cut wherever an operand begins or ends. A rank's
// slice lies elsewhere on each rank, while waits must be the same on all: so a sliced operand
// counts as all slices. Among operands that are cut in the same way what counts is where in the
// slice they lie:
//
//   slices of one section     | a  b  | a  b  | a  b  |      a and b do not conflict;
//                             |-------- whole --------|      the whole section conflicts with both
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "ebb/sharding/op_list.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// Cells [first, second).
using CellRange = std::pair<int, int>;

class Cells {
 public:
  // Cells of all operands of these lists. `slices`: ranks that a unit is cut over;
  // `secondary_slices`: ranks that a secondary copy of it is cut over, if any.
  Cells(std::span<const OpList* const> lists, int units, int slices, int secondary_slices);
  Cells(std::span<const OpList* const> lists, const Plan& plan)
      : Cells(lists, static_cast<int>(plan.layout.units.size()), plan.decisions.shards,
              plan.decisions.secondary_shards) {}

  int count() const { return count_; }
  const ControlCells& control() const { return control_; }
  // Adds to `ranges` the cells that an operand touches; also for lists that were not given.
  void Find(const Operand& operand, std::vector<CellRange>& ranges) const;

 private:
  // Sections with operands that take the same slices: bytes [begin, end), cut at multiples of
  // `stride`.
  struct Slices {
    int64_t begin = 0, end = 0, stride = 0;
    std::vector<int64_t> cuts;  // in the slice
  };
  struct Pool {
    std::vector<int64_t> cuts;
    std::vector<int> first_cell;  // by cut
    std::vector<int> slices;      // by cut: index of the range up to the next cut; -1: not cut
    std::vector<Slices> sliced;
  };
  static std::pair<int, int> KeyOf(const Place& place);
  int64_t EndOf(const Operand& operand) const;

  int slices_, secondary_slices_;
  ControlCells control_;
  int count_ = 0;
  std::map<std::pair<int, int>, Pool> pools_;
};

// Writes OpList::waits.
void DeriveWaits(const Cells& cells, OpList& list);

// A step that an evaluation interrupts finds other contents in the memory that parameters pass
// through. Operations of its own bring again the data that the rest of the step reads:
//
//   step     read u3 | upload u3 | gather u3 |- evaluation -|                           kernels u3
//   again                                     read u3 | upload u3 | gather u3
//
// Operations before `next`, in their order. The waits between them hold only if all operations
// run, so each of these comes behind a fence. The list is one without carried updates.
std::vector<int> FindToBringAgain(const Cells& cells, const OpList& list, int next);

// Carried updates from `next` on, with their moves. Each comes behind a fence, likewise.
std::vector<int> FindCarried(const OpList& list, int next);
// Whether carried updates have their place in this moment of the plan or in a later one. The same
// on every rank, also where the step before has left none.
bool HasCarriedFrom(const Plan& plan, size_t moment);

}  // namespace ebb::sharding
