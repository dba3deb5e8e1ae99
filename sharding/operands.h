// What an instruction touches: places in pools and files, and how many elements of which dtype are read or written
// there.
#pragma once

#include <cstdint>
#include <utility>

#include "ebb/runtime/config/dtype.h"
#include "ebb/sharding/place.h"

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

}  // namespace ebb::sharding
