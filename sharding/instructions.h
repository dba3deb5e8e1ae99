// A plan as the instructions that an engine runs: what each touches, on which stream it runs and what it waits
// for are all written in it. An engine that runs a fragment asks neither the model nor the config.
//
// Each instruction names its operands, every byte that it reads or writes; the waits follow from those alone
// (waits.h), so that a wait cannot be forgotten but by leaving out an operand. What came before the fragment is
// waited for through the Frontier (frontier.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "ebb/sharding/lists.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

enum class Access : uint8_t { kNone, kRead, kWrite, kReadWrite };
constexpr bool Reads(Access access) {
  return access == Access::kRead || access == Access::kReadWrite;
}
constexpr bool Writes(Access access) {
  return access == Access::kWrite || access == Access::kReadWrite;
}

// Bytes in a pool or file. kNone: the instruction has no such operand.
struct Operand {
  Place place = {};
  DType dtype = DType::kInt8;
  Access access = Access::kNone;
  int64_t count = 0;  // elements

  int64_t bytes() const { return count * SizeOf(dtype); }
  friend bool operator==(const Operand&, const Operand&) = default;
  template <class H>
  friend H AbslHashValue(H hash, const Operand& operand) {
    return H::combine(std::move(hash), operand.place, operand.dtype, operand.access, operand.count);
  }
};

// What the host and the streams tell each other in a step, as operands of Tier::kCpu and StateClass::kControl:
// offsets count cells, not bytes. Of what is there by parity, for two steps under way, a pair lies side by side: that
// of the instruction's own step first.
struct ControlCells {
  explicit ControlCells(int units) : squares(0), scale((units + 1) / 2 * 2) {}
  int64_t squares;                                 // by unit: of its gradient's shard
  int64_t scale;                                   // of the loss; how many steps were applied
  int64_t sums() const { return scale + 2; }       // pair: losses
  int64_t constants() const { return scale + 4; }  // pair: of updates that wait for the verdict
  int64_t early() const { return scale + 6; }      // pair: of updates that do not
  int64_t files() const { return scale + 8; }  // pair: whether the swap files are still this run's
  int64_t of_walks() const {
    return scale + 10;
  }  // an evaluation's sums, and what became of the files
  int64_t count() const { return scale + 12; }
  bool by_parity(int64_t cell) const { return cell >= sums() && cell < of_walks(); }
};

// What runs. Operands, in order, for each unit of a group:
enum class Code : uint8_t {
  kKernels,         // the trainer's: any
  kAllGather,       // own slice r, whole w
  kReduceScatter,   // whole r, slice w; then scratch w
  kAllReduce,       // slice rw; then scratch w
  kCopy,            // from r, to w
  kCast,            // from r, to w
  kAccumulate,      // slice r, shard w or rw, square w, scratch w
  kNorm,            // shard r, square w, scratch w
  kParameterNorms,  // gradient r, master r, parameter r, states r; then sums w or rw, constants r
  kUpdate,      // gradient r, master rw, parameter w or rw, states rw; then constants r, staging w
  kRead,        // file r, memory w
  kWrite,       // memory r, file w
  kCheckFiles,  // flag w
  kReadAsync,   // masters, parameters and states r, of one unit: for what is saved beside steps
  kPrepare,     // early constants w, scale r
  kExchange,    // records w, squares r, sums r, flag r, constants w, scale rw
  kExchangeNorms,  // sums r, records w, constants rw
};
std::string_view Name(Code code);

// Communicators, each used from one stream only.
enum class Lane : uint8_t { kNone, kGather, kSecondary, kReduce, kReplicas, kExchange };
inline constexpr int kLanes = 6;

// Where things start and end: the streams, and behind them where transfers with files end that started on the
// stream of the same kind, so that the next ones start while they are on their way.
using Line = uint8_t;
inline constexpr Line kParametersRead = kStreams, kStatesRead = kStreams + 1,
                      kWritten = kStreams + 2;
// And the one on which state is read beside steps.
inline constexpr Line kAsyncReads = kStreams + 3;
inline constexpr int kLines = kStreams + 4;
constexpr Line LineOf(StreamId stream) {
  return static_cast<Line>(stream);
}
Line EndOf(StreamId stream);

struct CellUse {
  int cell = 0;
  bool writes = false;
  bool by_parity = false;  // `cell` is that of parity 0, its neighbour that of parity 1
};

// Of an update, the norms before it and copies of masters: what operands do not say, and is the same in every step.
struct UpdateDetail {
  int sub_group = 0;
  int64_t begin = 0, end = 0;  // elements of what a rank updates of the unit
  int states = 0;              // how many operands behind the parameter
  bool early = false;          // does not wait for its step's verdict
  // Not applied: the parameter is made of the master all the same, as what follows carries it home.
  bool keeps_parameter = false;
  // Its first element, counted from the unit's first trainable one: plus `per_slice` times the number of the rank's
  // slice. Random bits of stochastic rounding follow from that and the unit's name.
  int64_t first = 0, per_slice = 0;
  uint64_t rounding_unit = 0;

  int64_t count() const { return end - begin; }
};

struct Instruction {
  Code code{};
  OperationKind role{};  // what it is for: its name in errors, timelines and tables
  StreamId stream{};
  Line starts = 0, ends = 0;
  Lane lane = Lane::kNone;
  bool carried = false;           // of the step before, whose parity it has
  bool by_parity = false;         // touches what is there by parity
  bool awaited = false;           // by a later instruction or fragment: it has an event
  bool divides = false;           // kReduceScatter, kAllReduce: the sum, by the step's divisor
  std::optional<DType> via = {};  // kCast: rounded to this one on the way
  int scope = -1;                 // kKernels: the newest that is open; -1: of none
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

struct FragmentLists {
  Lists<UpdateDetail> updates;
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
  std::shared_ptr<FragmentLists> lists = std::make_shared<FragmentLists>();
};

// The plan's operations as instructions, without waits. `carrying`: with the updates that the step before has left.
Fragment Lower(const Plan& plan, bool carrying);

}  // namespace ebb::sharding
