// A step that an evaluation interrupts finds other contents in the memory that parameters pass
// through. Instructions of its own bring again the data that the rest of the step reads:
//
//   step     read u3 | upload u3 | gather u3 |- evaluation -|                           kernels u3
//   again                                     read u3 | upload u3 | gather u3
#pragma once

#include <cstddef>
#include <vector>

#include "ebb/sharding/instructions.h"
#include "ebb/sharding/waits.h"

namespace ebb::sharding {

// Instructions before `next`, in their order. The waits between them hold only if all instructions
// run, so each of these comes behind a fence. The fragment is one without carried updates.
std::vector<int> FindToBringAgain(const Cells& cells, const Fragment& fragment, int next);

// Carried updates from `next` on, with their moves. Each comes behind a fence, likewise.
std::vector<int> FindCarried(const Fragment& fragment, int next);
// Whether carried updates have their place in this moment of the plan or in a later one. The same
// on every rank, also where the step before has left none.
bool HasCarriedFrom(const Plan& plan, size_t moment);

}  // namespace ebb::sharding
