#include "ebb/sharding/matrices.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ebb/runtime/base/newton_schulz_work.h"

namespace ebb::sharding {
namespace {

// Gives the matrices of one unit to ranks. `total`: by rank, the operations of all units so far.
void Assign(std::vector<OwnedMatrix>& matrices, std::vector<double>& total) {
  const auto operations = [](const OwnedMatrix& matrix) {
    return NewtonSchulzOperations(matrix.rows, matrix.columns, /*steps=*/1, /*halves=*/false);
  };
  std::vector<size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return operations(matrices[a]) > operations(matrices[b]);
  });
  std::vector<double> load(total.size(), 0);
  for (const size_t index : order) {
    size_t least = 0;
    for (size_t rank = 1; rank < load.size(); ++rank) {
      if (std::pair(load[rank], total[rank]) < std::pair(load[least], total[least])) least = rank;
    }
    load[least] += operations(matrices[index]);
    total[least] += operations(matrices[index]);
    matrices[index].owner = static_cast<int>(least);
  }
  std::vector<int64_t> next(load.size(), 0);
  for (OwnedMatrix& matrix : matrices) {
    int64_t& at = next[matrix.owner];
    matrix.at = at;
    at += (matrix.count() + kAlignment - 1) / kAlignment * kAlignment;
  }
}

}  // namespace

std::vector<MatrixShape> MatricesOf(const ParameterSpec& parameter) {
  const std::vector<int64_t>& shape = parameter.shape;
  const int64_t columns = shape.back(), rows = shape[shape.size() - 2];
  std::vector<MatrixShape> matrices;
  const int64_t stacked = Elements(shape) / (rows * columns);
  for (int64_t i = 0; i < stacked; ++i) {
    if (parameter.matrix_rows.empty()) matrices.push_back({rows, columns});
    for (const int64_t part : parameter.matrix_rows) matrices.push_back({part, columns});
  }
  return matrices;
}

std::vector<std::vector<OwnedMatrix>> OwnMatrices(const ModelSpec& model, const ModelLayout& layout,
                                                  bool is_exchanged) {
  std::vector<std::vector<OwnedMatrix>> of_units(model.units.size());
  std::vector<double> total(is_exchanged ? static_cast<size_t>(layout.shards) : 1, 0);
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    if (!model.units[unit].has_matrices) continue;
    std::vector<OwnedMatrix>& matrices = of_units[unit];
    for (const PlacedParameter& placed : layout.units[unit].trainable.placements) {
      int64_t begin = placed.offset;
      for (const MatrixShape& shape : MatricesOf(model[placed.parameter])) {
        matrices.push_back({.parameter = placed.parameter,
                            .begin = begin,
                            .rows = shape.rows,
                            .columns = shape.columns});
        begin = matrices.back().end();
      }
    }
    if (is_exchanged) {
      Assign(matrices, total);
    } else {
      for (OwnedMatrix& matrix : matrices) matrix.at = matrix.begin;
    }
  }
  return of_units;
}

int64_t OwnedElements(const std::vector<OwnedMatrix>& matrices) {
  int64_t most = 0;
  for (const OwnedMatrix& matrix : matrices) most = std::max(most, matrix.at + matrix.count());
  return most;
}

std::vector<MatrixPart> PartsOf(const std::vector<OwnedMatrix>& matrices, int64_t shard,
                                int slices) {
  std::vector<MatrixPart> parts;
  for (const OwnedMatrix& matrix : matrices) {
    for (int slice = static_cast<int>(matrix.begin / shard);
         slice < slices && slice * shard < matrix.end(); ++slice) {
      parts.push_back({.matrix = &matrix,
                       .slice = slice,
                       .begin = std::max(matrix.begin, slice * shard),
                       .end = std::min(matrix.end(), (slice + 1) * shard)});
    }
  }
  std::stable_sort(parts.begin(), parts.end(), [](const MatrixPart& a, const MatrixPart& b) {
    return std::pair(a.slice, a.matrix->owner) < std::pair(b.slice, b.matrix->owner);
  });
  return parts;
}

int64_t ExchangedElements(const std::vector<OwnedMatrix>& matrices, int64_t shard, int slices) {
  std::vector<int64_t> received(static_cast<size_t>(slices), 0);
  for (const MatrixPart& part : PartsOf(matrices, shard, slices)) {
    const int owner = part.matrix->owner;
    if (owner != part.slice) received[owner] += part.count();
  }
  return *std::max_element(received.begin(), received.end());
}

}  // namespace ebb::sharding
