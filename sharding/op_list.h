// A list of operations that runs as one: a step, a walk, the carried updates alone, or a part of a
// call that needs state. Waits for work from before a list go through the Frontier (frontier.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ebb/sharding/lists.h"
#include "ebb/sharding/op.h"

namespace ebb::sharding {

struct Moment {
  enum Kind : uint8_t { kBegin, kOpen, kClose, kFinish };
  Kind kind = kBegin;
  int scope = -1;
  int begin = 0, end = 0;  // operations issued now, in their order
  // The last of them, if scopes are open from now on: the trainer's kernels, which end before the
  // next moment. A scope that is open over others has one more kernel after each of them. -1: no
  // scope is open.
  int kernels = -1;
};

struct CellUse {
  int cell = 0;
  bool writes = false;
  bool by_parity = false;  // `cell` is the one of parity 0; its neighbour is the one of parity 1
};

// The waits of an operation, and those of others for it (DeriveWaits).
struct Waits {
  std::span<const int> on = {};          // operations of this list
  std::span<const CellUse> enters = {};  // and uses of these cells by earlier lists
  std::span<const CellUse> leaves = {};  // cells that no later operation on this line uses
  bool awaited = false;                  // by a later operation or list: it has an event
};
struct WaitMemory {
  Lists<int> on;
  Lists<CellUse> uses;
};

struct OpList {
  std::vector<Op> ops = {};
  std::vector<Waits> waits = {};  // by operation; empty: not derived
  std::vector<Moment> moments = {};
  std::vector<int> index_of = {};  // by Op::number: the operation; -1: it does not run
  // The first operations of the second and the third of three rounds. The second round may run any
  // number of times, so a wait across rounds goes through the frontier.
  std::vector<int> round_begins = {};
  int again = 0;  // how often more than once the plan's step runs the second
  // Belongs to a call that waits for it: a failure is that call's error, not the step's.
  bool of_state = false;
  // Likewise, for a read of state for a save beside steps, from the place of the last update.
  bool of_save = false;
  std::shared_ptr<const OpMemory> memory = nullptr;
  std::shared_ptr<const WaitMemory> wait_memory = nullptr;

  int size() const { return static_cast<int>(ops.size()); }
  // Bytes that the list itself takes in RAM, without `memory`.
  int64_t OwnBytes() const {
    const auto held = [](const auto& list) {
      return static_cast<int64_t>(list.capacity() * sizeof(list.front()));
    };
    return held(ops) + held(waits) + held(moments) + held(index_of) +
           (wait_memory == nullptr ? 0 : wait_memory->on.bytes() + wait_memory->uses.bytes());
  }
};

}  // namespace ebb::sharding
