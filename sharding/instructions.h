// A plan as instructions for an engine. An instruction says which bytes it touches, on which stream
// it runs and which instructions it waits for. An engine that runs a fragment asks neither the
// model nor the config.
//
// Each instruction names its operands: every byte that it reads or writes. The waits follow from
// the operands alone (waits.h), so only a missing operand can lose a wait. Waits for work from
// before the fragment go through the Frontier (frontier.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "ebb/sharding/lists.h"
#include "ebb/sharding/operands.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// The work of an instruction. Operands, in order, for each unit of a group:
enum class Code : uint8_t {
  kKernels,         // the trainer's: any
  kAllGather,       // own slice r, whole w
  kReduceScatter,   // whole r, slice w; then scratch w
  kAllReduce,       // slice rw; then scratch w
  kCopy,            // from r, to w
  kCast,            // from r, to w
  kCastMasters,     // the same, of masters, by sub-group
  kAccumulate,      // slice r, shard w or rw, square w, scratch w
  kNorm,            // shard r, square w, scratch w
  kParameterNorms,  // gradient r, master r, parameter r, states r; then sums w or rw, constants r
  kUpdate,     // gradient r, master rw, parameter w or rw, states rw; then constants r, staging w
  kRead,       // file r, memory w
  kWrite,      // memory r, file w
  kReadAsync,  // masters, parameters and states r, of one unit: for a save beside steps
  kPrepare,    // early constants w, scale r
  kSeal,       // record w, squares r, sums rw; then by unit gradient shard r (kSealShards)
  kConclude,   // records r, constants w, scale rw
  kSealNorms,  // sums of the device r, of the host r, record w
  kConcludeNorms,  // records r, constants rw
};
std::string_view Name(Code code);
// Operands of kSeal before the shards, in which it finds the name of what is not finite.
inline constexpr int kSealShards = 3;

// Communicators, each used from one stream only.
enum class Lane : uint8_t { kNone, kGather, kSecondary, kReduce, kReplicas, kExchange };
inline constexpr int kLanes = 6;

// Lines: where instructions start and end. Each stream is a line. Transfers with files start on a
// stream and end on a second line of their own, so that the next transfer starts while they run.
using Line = uint8_t;
inline constexpr Line kParametersRead = kStreams, kStatesRead = kStreams + 1,
                      kWritten = kStreams + 2;
// And, last, the one on which state is read beside steps. All others are of steps and evaluations.
inline constexpr Line kAsyncReads = kStreams + 3;
inline constexpr int kLines = kAsyncReads + 1;
constexpr Line LineOf(StreamId stream) {
  return static_cast<Line>(stream);
}
Line EndOf(StreamId stream);

struct CellUse {
  int cell = 0;
  bool writes = false;
  bool by_parity = false;  // `cell` is the one of parity 0; its neighbour is the one of parity 1
};

struct Instruction {
  Code code{};
  OperationKind role{};  // its name in errors, timelines and tables
  StreamId stream{};
  Line starts = 0, ends = 0;
  Lane lane = Lane::kNone;
  bool carried = false;            // of the step before; it has the parity of that step
  bool brings_parameters = false;  // one of those that bring a scope's parameters
  bool by_parity = false;          // touches the cell of the step's parity
  bool awaited = false;            // by a later instruction or fragment: it has an event
  bool divides = false;            // kReduceScatter, kAllReduce: the sum, by the step's divisor
  std::optional<DType> via = {};   // kCast: rounded to this one on the way
  int scope = -1;                  // kKernels: the newest that is open; -1: of none
  bool goes_on = false;  // kKernels: of scopes that were open before, behind one that has closed
  int operation = -1;    // of the plan
  int64_t bytes = 0;
  std::span<const UpdateDetail> updates =
      {};  // kUpdate, kParameterNorms, casts of masters: by part
  std::span<const Part> parts = {};
  std::span<const Operand> operands = {};
  std::span<const int> waits = {};       // instructions of this fragment
  std::span<const CellUse> enters = {};  // and uses of these cells by earlier fragments
  std::span<const CellUse> leaves = {};  // cells that no later instruction on this line uses
};

struct FragmentMoment {
  Moment::Kind kind{};
  int scope = -1;
  int begin = 0, end = 0;  // instructions issued now, in their order
  // The last of them, if scopes are open from now on: the trainer's kernels, which end before the
  // next moment. A scope that is open over others has one more kernel after each of them. -1: no
  // scope is open.
  int kernels = -1;
};

// Lists of instructions that stand for no operation of a plan. The others are in
// Fragment::lists_of_plan.
struct FragmentLists {
  Lists<Operand> operands;
  Lists<Part> parts;
  Lists<int> waits;
  Lists<CellUse> uses;
};

// A step, a walk, the carried updates alone, or a part of a call that needs state.
struct Fragment {
  std::vector<Instruction> instructions;
  std::vector<FragmentMoment> moments;
  std::vector<int> instruction_of;  // by operation of the plan; -1: none
  // The first instructions of the second and the third of three rounds. The second round may run
  // any number of times, so a wait across rounds goes through the frontier.
  std::vector<int> round_begins;
  int again = 0;  // how often more than once the plan's step runs the second
  // Belongs to a call that waits for it: a failure is that call's error, not the step's.
  bool of_state = false;
  // Likewise, for a read of state for a save beside steps, from the place of the last update.
  bool of_save = false;
  std::shared_ptr<FragmentLists> lists = std::make_shared<FragmentLists>();
  std::shared_ptr<const PlanLists> lists_of_plan = nullptr;
};

// The plan's operations, the trainer's kernels and kPrepare, without waits. `carrying`: the step
// before has left updates to this one.
Fragment Lower(const Plan& plan, bool carrying);

}  // namespace ebb::sharding
