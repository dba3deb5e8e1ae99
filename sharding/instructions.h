// A plan as the instructions that an engine runs: what each touches, on which stream it runs and what it waits
// for are all written in it. An engine that runs a fragment asks neither the model nor the config.
//
// Each instruction names its operands, every byte that it reads or writes; the waits follow from those alone
// (waits.h), so that a wait cannot be forgotten but by leaving out an operand. What came before the fragment is waited
// for through the Frontier (frontier.h).
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

// What runs. Operands, in order, for each unit of a group:
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
  kUpdate,      // gradient r, master rw, parameter w or rw, states rw; then constants r, staging w
  kRead,        // file r, memory w
  kWrite,       // memory r, file w
  kCheckFiles,  // flag w
  kReadAsync,   // masters, parameters and states r, of one unit: for what is saved beside steps
  kPrepare,     // early constants w, scale r
  kSeal,        // record w, squares r, sums rw, flag r; then by unit gradient shard r (kSealShards)
  kConclude,    // records r, constants w, scale rw
  kSealNorms,   // sums of the device r, of the host r, record w
  kConcludeNorms,  // records r, constants rw
};
std::string_view Name(Code code);
// Operands of kSeal before the shards, in which it finds the name of what is not finite.
inline constexpr int kSealShards = 4;

// Communicators, each used from one stream only.
enum class Lane : uint8_t { kNone, kGather, kSecondary, kReduce, kReplicas, kExchange };
inline constexpr int kLanes = 6;

// Where things start and end: the streams, and behind them where transfers with files end that started on the
// stream of the same kind, so that the next ones start while they are on their way.
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
  bool by_parity = false;  // `cell` is that of parity 0, its neighbour that of parity 1
};

struct Instruction {
  Code code{};
  OperationKind role{};  // what it is for: its name in errors, timelines and tables
  StreamId stream{};
  Line starts = 0, ends = 0;
  Lane lane = Lane::kNone;
  bool carried = false;            // of the step before; it has the parity of that step
  bool brings_parameters = false;  // one of those by which a scope's parameters come
  bool by_parity = false;          // touches what is there by parity
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
  std::span<const CellUse> leaves =
      {};  // cells of which this is the fragment's last use on its line
};

struct FragmentMoment {
  Moment::Kind kind{};
  int scope = -1;
  int begin = 0, end = 0;  // instructions issued now, in their order
  // The last of them, where a scope is open from now on: what the trainer runs until the next moment, when it has
  // ended. Those that stay open over others have one more behind each of these. -1: nothing is open.
  int kernels = -1;
};

// Of what no operation of a plan stands for; the others are in Fragment::lists_of_plan.
struct FragmentLists {
  Lists<Operand> operands;
  Lists<Part> parts;
  Lists<int> waits;
  Lists<CellUse> uses;
};

// A step, a walk, or the updates that a step has carried over, alone; or a part of what a call for state needs.
struct Fragment {
  std::vector<Instruction> instructions;
  std::vector<FragmentMoment> moments;
  std::vector<int> instruction_of;  // by operation of the plan; -1: none
  // Instructions that the second and the third of three rounds begin with. The second may run any number of times,
  // so that nothing waits across these but through the frontier.
  std::vector<int> seams;
  int again = 0;  // how often more than once the plan's step runs the second
  // Of a call that waits for it: what fails is that call's error, not the step's.
  bool of_state = false;
  bool of_save =
      false;  // likewise; it reads what is saved beside steps, wherever updates have written since
  std::shared_ptr<FragmentLists> lists = std::make_shared<FragmentLists>();
  std::shared_ptr<const PlanLists> lists_of_plan = nullptr;
};

// The plan's operations, the trainer's kernels and kPrepare, without waits. `carrying`: with what the step before left.
Fragment Lower(const Plan& plan, bool carrying);

}  // namespace ebb::sharding
