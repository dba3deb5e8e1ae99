// Operands of an operation: places in pools and files, each with the number of elements and the
// encoding that are read or written.
#pragma once

#include <cstdint>
#include <utility>

#include "ebb/runtime/base/encoding.h"
#include "ebb/sharding/place.h"

namespace ebb::sharding {

enum class Access : uint8_t { kNone, kRead, kWrite, kReadWrite };
constexpr bool Reads(Access access) {
  return access == Access::kRead || access == Access::kReadWrite;
}
constexpr bool Writes(Access access) {
  return access == Access::kWrite || access == Access::kReadWrite;
}

// Bytes in a pool or file. kNone: the operation has no such operand.
struct Operand {
  Place place = {};
  Encoding encoding = DType::kInt8;
  Access access = Access::kNone;
  StateClass content{};  // of a move: the class of what it holds, wherever it lies meanwhile
  int64_t count = 0;     // elements

  int64_t bytes() const { return encoding.bytes(count); }
  friend bool operator==(const Operand&, const Operand&) = default;
  template <class H>
  friend H AbslHashValue(H hash, const Operand& operand) {
    return H::combine(std::move(hash), operand.place, operand.encoding, operand.access,
                      operand.content, operand.count);
  }
};

// Messages of a step between host and device, and between ranks, as operands of Tier::kCpu and
// StateClass::kControl. Offsets count cells, not bytes: the engine knows how many constants there
// are. A cell by parity, for two steps at once, is a pair side by side. The first of the pair
// belongs to the operation's own step.
struct ControlCells {
  explicit ControlCells(int units) : squares(0), scale((units + 1) / 2 * 2) {}
  int64_t squares;                            // by unit: the squares of its gradient's shard
  int64_t scale;                              // the loss scale; the number of applied steps
  int64_t sums() const { return scale + 2; }  // pair: losses
  // Pairs: constants of updates that wait for the verdict, and of those that do not; as the host
  // writes them, and the copies that updates on the device read.
  int64_t constants() const { return scale + 4; }
  int64_t early() const { return scale + 6; }
  int64_t device_constants() const { return scale + 8; }
  int64_t device_early() const { return scale + 10; }
  int64_t record() const { return scale + 12; }   // pair: this rank's record
  int64_t records() const { return scale + 14; }  // pair: the records of all ranks
  // An evaluation's own: its sums, its record, and the records of all ranks.
  int64_t walk_sums() const { return scale + 16; }
  int64_t walk_record() const { return scale + 17; }
  int64_t walk_records() const { return scale + 18; }
  // For LAMB and LARS: this rank's sums from the device, its record of all sums, and the records of
  // all ranks.
  int64_t norm_sums() const { return scale + 19; }
  int64_t norm_record() const { return scale + 20; }
  int64_t norm_records() const { return scale + 21; }
  int64_t count() const { return scale + 22; }
  bool by_parity(int64_t cell) const { return cell >= sums() && cell < walk_sums(); }
};

// Details of updates, norms and copies of masters beside their operands, the same in each step.
struct UpdateDetail {
  int sub_group = 0;
  int64_t begin = 0, end = 0;  // elements, of the part of the unit that a rank updates
  int states = 0;              // how many operands behind the parameter
  bool early = false;          // does not wait for its step's verdict
  // Skipped or not, the parameter is made of the master, as the next operation carries it to its
  // place.
  bool keeps_parameter = false;
  // Stochastic rounding draws its bits from the unit's name and the element's number in the unit:
  // `begin` plus this times the number of the rank's slice.
  int64_t per_slice = 0;
  uint64_t rounding_unit = 0;

  int64_t count() const { return end - begin; }
};

}  // namespace ebb::sharding
