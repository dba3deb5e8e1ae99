// Which rank of a shard group makes each matrix of Muon's orthogonal, and where the matrix lies in
// that rank's array. Slices of a unit cut matrices anywhere, so a rank collects its own matrices
// from the others before, and hands out their parts behind.
//
//   slices of rank   | 0        | 1        | 2        | 3        |
//   matrices         | q     | k     | v     | o     | up ...     |
//   owner              0       1       2       3       0
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/layout.h"
#include "ebb/sharding/model.h"

namespace ebb::sharding {

struct OwnedMatrix {
  ParameterId parameter{};
  int64_t begin = 0;  // its first element in the unit's trainable section
  int64_t rows = 0, columns = 0;
  int owner = 0;   // the number of the rank's slice
  int64_t at = 0;  // its first element in the owner's array

  int64_t count() const { return rows * columns; }
  int64_t end() const { return begin + count(); }
  friend bool operator==(const OwnedMatrix&, const OwnedMatrix&) = default;
};

// By unit; empty for a unit without matrices. The longest computation of a unit goes to the rank with
// the least of this unit so far, and of several to the one with the least of all units. `is_exchanged`:
// false if every rank holds all elements, and computes all matrices in place.
std::vector<std::vector<OwnedMatrix>> OwnMatrices(const ModelSpec& model, const ModelLayout& layout,
                                                  bool is_exchanged);

// The most elements that a rank owns of a unit, with what lies between its matrices.
int64_t OwnedElements(const std::vector<OwnedMatrix>& matrices);

// The elements of a matrix that lie in one rank's slice.
struct MatrixPart {
  const OwnedMatrix* matrix = nullptr;
  int slice = 0;
  int64_t begin = 0, end = 0;  // in the unit's trainable section

  int64_t count() const { return end - begin; }
};
// All of them, by slice, then by owner.
std::vector<MatrixPart> PartsOf(const std::vector<OwnedMatrix>& matrices, int64_t shard,
                                int slices);
// The most elements that a rank receives from others when matrices go to their owners.
int64_t ExchangedElements(const std::vector<OwnedMatrix>& matrices, int64_t shard, int slices);

// Rows and columns of each matrix of a parameter (ParameterSpec::matrix_rows), in order.
struct MatrixShape {
  int64_t rows = 0, columns = 0;
};
std::vector<MatrixShape> MatricesOf(const ParameterSpec& parameter);

}  // namespace ebb::sharding
