#include "ebb/optim/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "ebb/optim/matrix_product.h"
#include "ebb/optim/norm.h"
#include "ebb/optim/scalar_ops.h"

namespace ebb::optim {
namespace {

template <class T>
void Scale(ThreadTeam& team, const void* from, float factor, void* to, int64_t count) {
  constexpr int64_t kGrain = 16 * 1024;
  team.Run(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      ScalarOps::Store<Rounding::kNearest>(
          factor * ScalarOps::Load(static_cast<const T*>(from) + i), static_cast<T*>(to) + i);
    }
  });
}

}  // namespace

NewtonSchulz NewtonSchulzOf(const OptimizerConfig& muon, int64_t rows, int64_t columns) {
  const auto height = static_cast<double>(rows), width = static_cast<double>(columns);
  const double scale = muon.matches_adamw_size ? 0.2 * std::sqrt(std::max(height, width))
                                               : std::sqrt(std::max(1.0, height / width));
  const auto& [a, b, c] = muon.newton_schulz_coefficients;
  return {.steps = muon.newton_schulz_steps,
          .a = static_cast<float>(a),
          .b = static_cast<float>(b),
          .c = static_cast<float>(c),
          .scale = static_cast<float>(scale)};
}

// Each step goes from one memory to the other, and the last one ends in the caller's.
void* IterationStart(const NewtonSchulz& rule, const MatrixArrays& arrays) {
  return rule.steps % 2 == 1 ? arrays.scratch : arrays.matrix;
}

void Iterate(const NewtonSchulz& rule, const MatrixArrays& arrays,
             absl::FunctionRef<void(const Product&)> multiply) {
  const int64_t rows = arrays.rows, columns = arrays.columns, least = std::min(rows, columns);
  const NewtonSchulzScratch scratch(rows, columns, SizeOf(arrays.dtype));
  const MatrixView gram{arrays.scratch + scratch.gram, least},
      polynomial{arrays.scratch + scratch.polynomial, least};
  const bool is_wide = rows <= columns;
  void* from = IterationStart(rule, arrays);
  void* to = from == arrays.matrix ? arrays.scratch : arrays.matrix;
  for (int64_t step = 0; step < rule.steps; ++step) {
    const MatrixView x{from, columns}, next{to, columns};
    const float scale = step + 1 < rule.steps ? 1 : rule.scale;
    multiply({.rows = least,
              .columns = least,
              .depth = std::max(rows, columns),
              .dtype = arrays.dtype,
              .a = is_wide ? x : x.Transposed(),
              .b = is_wide ? x.Transposed() : x,
              .out = gram,
              .symmetric = true});
    multiply({.rows = least,
              .columns = least,
              .depth = least,
              .dtype = arrays.dtype,
              .a = gram,
              .b = gram,
              .out = polynomial,
              .c = gram,
              .alpha = rule.c,
              .beta = rule.b,
              .symmetric = true});
    multiply({.rows = rows,
              .columns = columns,
              .depth = least,
              .dtype = arrays.dtype,
              .a = is_wide ? polynomial : x,
              .b = is_wide ? x : polynomial,
              .out = next,
              .c = x,
              .alpha = scale,
              .beta = scale * rule.a});
    std::swap(from, to);
  }
}

void Orthogonalise(ThreadTeam& team, const NewtonSchulz& rule, const MatrixArrays& arrays) {
  const int64_t count = arrays.rows * arrays.columns;
  const NewtonSchulzScratch scratch(arrays.rows, arrays.columns, SizeOf(arrays.dtype));
  const std::span<double> blocks(reinterpret_cast<double*>(arrays.scratch + scratch.gram),
                                 static_cast<size_t>(NormBlocks(count)));
  const double squares = SumOfSquares(team, arrays.matrix, arrays.dtype, count, blocks);
  const auto factor =
      static_cast<float>(1 / std::max(std::sqrt(squares), static_cast<double>(rule.epsilon)));
  void* const start = IterationStart(rule, arrays);
  if (arrays.dtype == DType::kBFloat16) {
    Scale<BFloat16>(team, arrays.matrix, factor, start, count);
  } else {
    Scale<float>(team, arrays.matrix, factor, start, count);
  }
  Iterate(rule, arrays, [&](const Product& product) { Multiply(team, product); });
}

}  // namespace ebb::optim
