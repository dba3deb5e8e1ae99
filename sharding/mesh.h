// Ranks as a grid. A rank's number is its coordinates in mixed radix, the first axis slowest:
// pipeline, replica, outer, inner, tensor. Tensor is innermost, because its messages are the most
// frequent.
//
//   rank               0 1 2 3 4 5 6 7     8 ranks with "ebb.mesh": {"tensor": 2}
//   tensor             0 1 0 1 0 1 0 1     "ebb.shard_group": 2
//   outer (a shard)    0 0 1 1 0 0 1 1
//   replica            0 0 0 0 1 1 1 1
//
// Data ranks are replica x outer x inner: they have different samples, and gradients are a mean
// over them. A unit is cut over outer x inner, and hpZ's second copy over inner alone. Tensor ranks
// have the same samples, and each has a part of the model.
//
// Communicators of a trainer's own layers, among the ranks that differ in some axes only:
//
//   world.Split(/*colour=*/mesh.with(rank, Axis::kTensor, 0), /*key=*/rank)
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "ebb/runtime/config/config.h"

namespace ebb {

enum class Axis : uint8_t { kPipeline, kReplica, kOuter, kInner, kTensor };
inline constexpr int kAxes = 5;

// A set of axes; also the ranks that differ in these coordinates only.
class Axes {
 public:
  constexpr Axes() = default;
  constexpr Axes(Axis axis) : Axes({axis}) {}
  constexpr Axes(std::initializer_list<Axis> of) {
    for (const Axis axis : of) bits_ = static_cast<uint8_t>(bits_ | (1u << static_cast<int>(axis)));
  }
  constexpr bool Has(Axis axis) const { return ((bits_ >> static_cast<int>(axis)) & 1u) != 0; }
  friend constexpr Axes operator|(Axes a, Axes b) {
    a.bits_ = static_cast<uint8_t>(a.bits_ | b.bits_);
    return a;
  }
  friend constexpr bool operator==(Axes, Axes) = default;

 private:
  uint8_t bits_ = 0;
};
inline constexpr Axes kShardAxes{Axis::kOuter, Axis::kInner};
// The ranks that have the model together.
inline constexpr Axes kModelAxes{Axis::kOuter, Axis::kInner, Axis::kTensor};
inline constexpr Axes kDataAxes{Axis::kReplica, Axis::kOuter, Axis::kInner};
inline constexpr Axes kWorldAxes{Axis::kPipeline, Axis::kReplica, Axis::kOuter, Axis::kInner,
                                 Axis::kTensor};

struct Mesh {
  std::array<int, kAxes> sizes = {1, 1, 1, 1, 1};  // by axis

  int size(Axes axes) const;
  int ranks() const { return size(kWorldAxes); }
  int coordinate(int rank, Axis axis) const { return index(rank, axis); }
  // The number of `rank` among the ranks that differ in these axes, and the rank with that number.
  int index(int rank, Axes axes) const;
  int with(int rank, Axes axes, int index) const;

  friend bool operator==(const Mesh&, const Mesh&) = default;
};

// The mesh of a configuration for `ranks` ranks in all; `config`: Config::ForWorld's.
Mesh MeshOf(const Config& config, int ranks);

// Whether a rank adds a value of its own to a sum over the world. `whole`: the axes along which all
// ranks have the same value; there the first rank counts for all.
bool Counts(Axes whole, const Mesh& mesh, int rank);

}  // namespace ebb
