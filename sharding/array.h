// An array is a row of the table of a rank's pools. A row says what the array is for, its elements,
// and where they lie. Control cells (operands.h) and the memory of calls for state have no rows.
//
//   master of block 3 | 600 elements | [0, 200) device | [200, 400) cpu | [400, 600) nvme
#pragma once

#include <cstdint>
#include <string_view>

#include "ebb/runtime/base/encoding.h"
#include "ebb/sharding/place.h"
#include "ebb/sharding/state.h"

namespace ebb::sharding {

enum class Purpose : uint8_t {
  // From step to step.
  kParameter,      // of a section of a unit
  kMaster,         // of a unit: fp32, or the low halves of split masters
  kState,          // of a unit: an optimizer state
  kGathered,       // of a section, whole while it is used
  kSecondary,      // of a section: this rank's part of hpZ's second copy
  kGradient,       // that backward writes: of a unit, or of a visit (GradientKey)
  kGradientShard,  // of a unit: reduced; at stage 0 whole
  // Boundary activations of a visit, a turn for each micro-batch of a round.
  kOutput,
  kOutputGradient,
  kWalkOutputs,  // of all visits of an evaluation, two turns for each micro-batch
  kOutputAway,   // while it waits below the device
  // Handed on between neighbouring operations, on the device or in host memory.
  kSentGradient,  // casts of one bucket
  kRoundedSlice,  // slices of one bucket, rounded to the communication dtype
  kNormScratch,   // of optim::SumOfSquares
  kRecords,       // of all ranks, then this rank's own
  kNormSums,      // for optimizers that take norms: this rank's sums of parameters (norm_records.h)
  kNormRecords,   // of all ranks of a shard group, then this rank's own
  kSumScratch,    // where pieces of all ranks are summed in one order (ebb.deterministic_reduce)
  kTensorScratch,  // likewise, of a trainer's kernels over tensor
  kOwnGradient,    // fp32, of one slice of a parameter, for an optimizer of the trainer's
  kOwnMaster,      // likewise its master, if masters are not kept as such
  // Rings of slots in host memory: parameters of one group of gathers; masters of one sub-group,
  // which stay from a unit's last gather to its update; a unit's reduced shard; a boundary.
  kParameterSlot,
  kMasterSlot,
  kGradientSlot,
  kOutputSlot,
  kLanding,  // reduced slices of one bucket on their way to shards in host memory
  // The parts of a work slot, on the device or in host memory: of one sub-group in its update.
  kWorkMaster,
  kWorkState,
  kWorkGradient,
  kWorkParameter,
  // Muon's, a turn of a ring for each unit on its way: this rank's part of the directions, and the
  // matrices that it owns. Then the scratch of the sub-group and of the matrix that are computed.
  kDirection,
  kMatrices,
  kWideDirection,  // fp32, if directions are not
  kIteration,
  kWorkspace,  // the trainer's scratch
};
inline constexpr int kPurposes = static_cast<int>(Purpose::kWorkspace) + 1;

// There is an array of each of these.
enum class ArrayOf : uint8_t { kRank, kTier, kUnit, kSection, kVisit, kGradientKey };

struct PurposeFacts {
  std::string_view name;
  StateClass counted{};  // the class that counts its memory
  ArrayOf of{};
  bool updated = false;  // by the optimizer, with an extent for each sub-group
};
inline constexpr PurposeFacts kPurposeFacts[kPurposes] = {
    {"parameter", StateClass::kParameter, ArrayOf::kSection},
    {"master", StateClass::kMaster, ArrayOf::kUnit, /*updated=*/true},
    {"state", StateClass::kOptimizer, ArrayOf::kUnit, /*updated=*/true},
    {"gathered", StateClass::kGather, ArrayOf::kSection},
    {"secondary", StateClass::kSecondary, ArrayOf::kSection},
    {"gradient", StateClass::kGradient, ArrayOf::kGradientKey},
    {"gradient shard", StateClass::kGradient, ArrayOf::kUnit},
    {"output", StateClass::kActivation, ArrayOf::kVisit},
    {"output gradient", StateClass::kActivation, ArrayOf::kVisit},
    {"walk outputs", StateClass::kActivation, ArrayOf::kRank},
    {"output away", StateClass::kActivation, ArrayOf::kVisit},
    {"sent gradient", StateClass::kStaging, ArrayOf::kRank},
    {"rounded slice", StateClass::kStaging, ArrayOf::kRank},
    {"norm scratch", StateClass::kStaging, ArrayOf::kTier},
    {"records", StateClass::kStaging, ArrayOf::kRank},
    {"norm sums", StateClass::kStaging, ArrayOf::kTier},
    {"norm records", StateClass::kStaging, ArrayOf::kRank},
    {"sum scratch", StateClass::kStaging, ArrayOf::kRank},
    {"tensor scratch", StateClass::kStaging, ArrayOf::kRank},
    {"own gradient", StateClass::kStaging, ArrayOf::kTier},
    {"own master", StateClass::kStaging, ArrayOf::kTier},
    {"parameter slot", StateClass::kStaging, ArrayOf::kRank},
    {"master slot", StateClass::kStaging, ArrayOf::kRank},
    {"gradient slot", StateClass::kStaging, ArrayOf::kRank},
    {"output slot", StateClass::kStaging, ArrayOf::kRank},
    {"landing", StateClass::kStaging, ArrayOf::kRank},
    {"work master", StateClass::kStaging, ArrayOf::kTier},
    {"work state", StateClass::kStaging, ArrayOf::kTier},
    {"work gradient", StateClass::kStaging, ArrayOf::kTier},
    {"work parameter", StateClass::kStaging, ArrayOf::kTier},
    {"direction", StateClass::kStaging, ArrayOf::kTier},
    {"matrices", StateClass::kStaging, ArrayOf::kRank},
    {"wide direction", StateClass::kStaging, ArrayOf::kTier},
    {"iteration", StateClass::kStaging, ArrayOf::kRank},
    {"workspace", StateClass::kWorkspace, ArrayOf::kRank},
};
constexpr const PurposeFacts& FactsOf(Purpose purpose) {
  return kPurposeFacts[static_cast<int>(purpose)];
}

// How the ranks that hold a unit together share the array.
enum class Spread : uint8_t {
  kWhole,           // each has all of it
  kSlice,           // equal flat slices, one a rank of the shard group
  kSecondarySlice,  // likewise, one a rank that holds a secondary copy with the others
  kPartial,         // each has a term, and the value is their sum
  kOwned,           // each matrix is whole on one of them
};

// Ticks of the plan, both ends included.
struct Lifetime {
  int begin = 0, end = 0;
};

// Elements [begin, end) of this rank's part, in one place.
struct Extent {
  int64_t begin = 0, end = 0;
  Place place = {};
  int64_t count() const { return end - begin; }
  friend bool operator==(const Extent&, const Extent&) = default;
};

struct Array {
  Purpose purpose{};
  int of = 0;             // unit, visit or GradientKey; kTier: 0 on the device, 1 in host memory
  bool trainable = true;  // kSection: which
  int state = 0;          // kState, kWorkState
  Encoding encoding = DType::kInt8;  // scratch and slots are bytes
  Spread spread = Spread::kWhole;
  int64_t elements = 0;  // of this rank's part; 0: there is none
  // The row that this one is another name for. An fp32 parameter may be its own master, a unit that
  // is kept whole is gathered already, and the gradient of one rank is the shard.
  int same_as = -1;
  // It lies behind the row before it: in its block of memory, or in each turn of its ring.
  bool behind = false;
  bool shares = false;  // memory with other arrays, by lifetime
  // A ring: the elements of one turn lie `turn_bytes` behind those of the turn before.
  int turns = 1;
  int64_t turn_bytes = 0;
  int first_extent = 0, extents = 0;      // of Table::extents
  int first_lifetime = 0, lifetimes = 0;  // of Table::lifetimes

  int64_t bytes() const { return encoding.bytes(elements); }
  friend bool operator==(const Array&, const Array&) = default;
};

}  // namespace ebb::sharding
