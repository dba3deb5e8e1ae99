// An operation of a step, a walk or a call: what it does, on which stream, and every byte that it
// reads or writes. Plans, tables, predictions and the engine read the same operations. An engine
// that runs them asks neither the model nor the config.
//
// A role says what an operation is for. Its code follows: one of the few things that an engine can
// do with operands. The waits follow from the operands alone (waits.h), so only a missing operand
// can lose a wait.
#pragma once

#include <cstdint>
#include <optional>
#include <ranges>
#include <span>
#include <string_view>
#include <utility>

#include "ebb/sharding/array.h"
#include "ebb/sharding/lists.h"
#include "ebb/sharding/mesh.h"
#include "ebb/sharding/operands.h"

namespace ebb::sharding {

// Operands, in order, for each unit of a group:
enum class Code : uint8_t {
  kKernels,       // the trainer's: any
  kRedistribute,  // from r, to w; an all-reduce: both in one, rw. Then scratch w, where it sums
  kCopy,          // from r, to w
  kTransfer,      // the same, one of them in a file. Starts on a stream, ends on a line of its own
  kConvert,       // from r, to w: another encoding
  kAccumulate,    // slice r, shard w or rw, square w, scratch w
  kNorm,          // shard r, square w, scratch w; by a rule: as kUpdate, but sums w or rw come last
                  // but one, and nothing else is written
  kUpdate,  // gradient r, master rw, parameter w or rw, states rw; then constants r, staging w
  kHost,    // a task of the host: any
};

enum class Role : uint8_t {
  kMark,  // compute: losses, which a trainer adds outside of scopes. Beside steps: a place to wait for
  kScopes,  // compute: the trainer's kernels in the scopes that are open
  kGather,  // all-gather of units from their slices into their slots
  // ZeRO++'s hpZ: this rank's part of units just gathered, into its secondary shards; all-gather of
  // units from those, within the ranks that hold a copy of them together
  kFillSecondary,
  kGatherSecondary,
  kCast,        // whole gradients from the accumulation to the communication dtype, into staging
  kReduce,      // reduce-scatter of whole gradients, divided (with replicas: only summed)
  kAllReduce,   // replicas: sums the reduced slices over the shard groups, divided
  kRound,       // replicas: the slices from fp32 to the communication dtype
  kAccumulate,  // adds the reduced slice to the shard; the last one takes the norm's squares
  // The squares of a shard that kReduce or kSumTensor wrote; of all at Finish if a step holds
  // updates.
  kNorm,
  kSumTensor,       // all-reduce of finished shards over tensor (ParameterSpec::sums_gradient)
  kGatherGradient,  // stage 0: the reduced gradient whole on every rank
  kPrepare,         // constants of updates that do not wait for the verdict: constants w, scale r
  kSeal,            // this rank's record of norm, overflow, loss, scope hash and errors: record w,
                    // squares r, sums rw; then by unit gradient shard r (kSealShards)
  kExchange,        // all-gather of the records of all ranks
  kConclude,        // the verdict that follows from them: records r, constants w, scale rw
  kParameterNorms,  // of a sub-group: what LAMB and LARS know of whole parameters before an update
  kSealNorms,       // this rank's record of them: sums of the device r, of the host r, record w
  kExchangeNorms,   // all-gather of the records of a shard group, and of its tensor ranks
  kConcludeNorms,   // the constants that follow from them: records r, constants rw
  kCopyControl,     // records, norms and constants, between the control block and the device
  kUpdate,          // the optimizer, one sub-group of a unit
  // Muon, of a unit of matrices: the direction of a sub-group, as kUpdate's operands, but the master
  // w is the wide direction, and the parameter w the direction; all-to-all-v of directions to the
  // owners of matrices; Newton-Schulz's iteration: matrices rw, scratch w; all-to-all-v back. Then
  // kUpdate of each sub-group, whose gradient r is its part of that.
  kMomentum,
  kToOwners,
  kOrthogonalise,
  kFromOwners,
  kRefresh,      // all-gather of updated parameters of units that are kept whole
  kRead,         // moves from the swap file to host memory
  kUpload,       // moves from host memory to the device
  kDownload,     // moves from the device to host memory
  kWrite,        // moves from host memory to the swap file
  kCastMasters,  // low-precision copies of masters in host memory, by sub-group, for a gather
  kSave,         // reads masters, parameters and states of a unit for a save beside steps
};
inline constexpr int kRoles = static_cast<int>(Role::kSave) + 1;
// Operands of kSeal before the shards, in which it finds the name of what is not finite.
inline constexpr int kSealShards = 3;

// How ranks move what they share: by from and to of RoleFacts.
enum class Movement : uint8_t { kAllGather, kReduceScatter, kAllReduce, kAllToAllV };

struct RoleFacts {
  Role role{};
  std::string_view name;  // in errors, timelines and tables
  Code code{};
  // kRedistribute: among the ranks that differ in these axes, whose parts are equal slices.
  Axes axes = {};
  Spread from = Spread::kWhole, to = Spread::kWhole;
  bool brings_parameters = false;  // one of those that bring a scope's parameters
};
const RoleFacts& FactsOf(Role role);
Movement MovementOf(Role role);  // of kRedistribute
inline std::string_view Name(Role role) {
  return FactsOf(role).name;
}

enum class StreamId : uint8_t {
  kCompute,
  kGather,
  kReduce,
  kUpdate,  // on the device
  // Streams of offloaded data. Reads of parameters have a stream of their own, because reads of
  // states wait for updates.
  kUpload,
  kDownload,
  kHostSum,     // sums and norms of gradients that live in host memory
  kHostUpdate,  // on the processor, of masters and states that are not on the device
  kReadParameters,
  kReadStates,
  kWrite,
};
inline constexpr int kStreams = 11;
std::string_view Name(StreamId stream);

// Lines: where operations start and end. Each stream is a line. Transfers with files start on a
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

struct Part {
  int unit = 0;
  int scope = -1;  // of the step; -1 where the operation is not a scope's
  // kAccumulate: the shard's first contribution of the step, which overwrites. kParameterNorms: the
  // first of its stream, likewise.
  bool first = false;
  bool last = false;  // kAccumulate, kNorm: the gradient is final
  friend bool operator==(const Part&, const Part&) = default;
  template <class H>
  friend H AbslHashValue(H hash, const Part& part) {
    return H::combine(std::move(hash), part.unit, part.scope, part.first, part.last);
  }
};

// The steps in which an operation runs: those to which the step before has left updates, or others.
enum class When : uint8_t { kAlways, kCarrying, kNotCarrying };

// An operation's lists lie in memory of the plan or the list that has it (OpMemory).
struct Op {
  Role role{};
  StreamId stream{};
  Line starts = 0, ends = 0;
  When when = When::kAlways;
  bool by_parity = false;         // touches a control cell of the step's parity
  bool divides = false;           // kReduce, kAllReduce: the sum, by the step's divisor
  bool goes_on = false;           // kScopes: behind a close, of scopes that were open before it
  std::optional<DType> via = {};  // kConvert: rounded to this one on the way
  int scope = -1;                 // kScopes: the newest that is open
  int number = -1;                // in tables; -1: not shown there
  // Collectives: received from or sent to other ranks; kScopes: in the kernels' own collectives
  // (Visit::forward_tensor_bytes); else read and written.
  int64_t bytes = 0;
  std::span<const Part> parts = {};  // units of a bucket
  std::span<const Operand> operands = {};
  // kUpdate, kParameterNorms, kCastMasters: by sub-group.
  std::span<const UpdateDetail> updates = {};

  Code code() const { return FactsOf(role).code; }
  Axes axes() const { return FactsOf(role).axes; }
  // One of the step before, whose parity it has.
  bool carried() const { return when == When::kCarrying; }
  bool runs(bool carrying) const {
    return when != (carrying ? When::kNotCarrying : When::kCarrying);
  }
  bool reads_file() const { return operands.front().place.tier == Tier::kNvme; }  // kTransfer
  // kRead, kUpload, kDownload, kWrite: their operands are pairs, from and to.
  auto moves() const {
    using enum Role;
    const bool any = role == kRead || role == kUpload || role == kDownload || role == kWrite;
    return std::views::iota(size_t{0}, any ? operands.size() / 2 : 0) |
           std::views::transform([of = operands](size_t i) {
             const Operand &from = of[2 * i], &to = of[2 * i + 1];
             return Move{from.content, from.place, to.place, from.bytes()};
           });
  }
};

// The memory that the spans of operations point into.
struct OpMemory {
  Lists<Part> parts;
  Lists<Operand> operands;
  Lists<UpdateDetail> updates;

  void Close() {  // lists of updates are not kept once
    parts.Close();
    operands.Close();
  }
  int64_t bytes() const { return parts.bytes() + operands.bytes() + updates.bytes(); }
};

}  // namespace ebb::sharding
