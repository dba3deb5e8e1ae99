// Newton-Schulz's iteration and its products, against fp64, and the same bits for every target and
// team.
#include "ebb/optim/newton_schulz.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "ebb/optim/matrix_product.h"
#include "every_target.h"

namespace ebb::optim::newton_schulz_test {
namespace {

struct Shape {
  int64_t rows, columns;
};
constexpr Shape kShapes[] = {{1, 1},   {1, 70},   {70, 1},   {5, 3},
                             {64, 64}, {48, 200}, {200, 48}, {131, 257}};

std::vector<double> Matrix(const Shape& shape, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> matrix(static_cast<size_t>(shape.rows * shape.columns));
  // Numbers of bf16, so that all dtypes begin with the same.
  for (double& value : matrix)
    value = static_cast<float>(BFloat16(static_cast<float>(normal(random))));
  return matrix;
}

// The paper's form, in fp64, with the rows as the smaller side.
std::vector<double> Reference(const NewtonSchulz& rule, const Shape& shape,
                              const std::vector<double>& matrix) {
  const bool tall = shape.rows > shape.columns;
  const int64_t n = std::min(shape.rows, shape.columns), m = std::max(shape.rows, shape.columns);
  std::vector<double> x(matrix.size()), next(matrix.size());
  const auto at = [&](int64_t i, int64_t k) -> size_t {
    return static_cast<size_t>(tall ? k * n + i : i * m + k);
  };
  double squares = 0;
  for (const double value : matrix) squares += value * value;
  const double norm = std::max(std::sqrt(squares), static_cast<double>(rule.epsilon));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < m; ++k) x[static_cast<size_t>(i * m + k)] = matrix[at(i, k)] / norm;
  const auto square = static_cast<size_t>(n * n);
  std::vector<double> gram(square), polynomial(square);
  for (int64_t step = 0; step < rule.steps; ++step) {
    const auto product = [&](const std::vector<double>& a, const std::vector<double>& b, int64_t i,
                             int64_t j, int64_t depth, int64_t row, int64_t column) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k)
        sum += a[static_cast<size_t>(i * depth + k)] * b[static_cast<size_t>(k * row + j * column)];
      return sum;
    };
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < n; ++j)
        gram[static_cast<size_t>(i * n + j)] = product(x, x, i, j, m, 1, m);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        polynomial[static_cast<size_t>(i * n + j)] = rule.b * gram[static_cast<size_t>(i * n + j)] +
                                                     rule.c * product(gram, gram, i, j, n, n, 1);
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t k = 0; k < m; ++k)
        next[static_cast<size_t>(i * m + k)] =
            rule.a * x[static_cast<size_t>(i * m + k)] + product(polynomial, x, i, k, n, m, 1);
    }
    std::swap(x, next);
  }
  std::vector<double> result(matrix.size());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < m; ++k)
      result[at(i, k)] = rule.scale * x[static_cast<size_t>(i * m + k)];
  return result;
}

template <class T>
std::vector<T> Orthogonal(ThreadTeam& team, const NewtonSchulz& rule, const Shape& shape,
                          const std::vector<double>& matrix) {
  std::vector<T> values;
  for (const double value : matrix) values.push_back(T(static_cast<float>(value)));
  const DType dtype = sizeof(T) == 2 ? DType::kBFloat16 : DType::kFloat32;
  const NewtonSchulzScratch scratch(shape.rows, shape.columns, SizeOf(dtype));
  std::vector<std::byte> memory(static_cast<size_t>(scratch.bytes + scratch.kAlignment),
                                std::byte{0xff});
  std::byte* const aligned =
      memory.data() +
      (scratch.kAlignment - reinterpret_cast<intptr_t>(memory.data()) % scratch.kAlignment);
  Orthogonalise(team, rule,
                {.matrix = values.data(),
                 .rows = shape.rows,
                 .columns = shape.columns,
                 .dtype = dtype,
                 .scratch = aligned});
  return values;
}

// |a - b| / |b|, Frobenius.
template <class T>
double Distance(const std::vector<T>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(static_cast<double>(static_cast<float>(a[i])) - b[i], 2);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

TEST(NewtonSchulzTest, Fp32IsNearTheSameIterationInFp64) {
  ThreadTeam team(2);
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(::testing::Message() << shape.rows << " x " << shape.columns);
    for (const int64_t steps : {5, 4}) {
      const NewtonSchulz rule{.steps = steps, .scale = 1.7f};
      const std::vector<double> matrix = Matrix(shape, 3);
      EXPECT_LT(
          Distance(Orthogonal<float>(team, rule, shape, matrix), Reference(rule, shape, matrix)),
          1e-5);
    }
  }
}

// Each of 15 products rounds to 8 bits: torch 2.15 is 1.1e-2 to 1.6e-2 from fp64 for these shapes
// from 48 on. In small matrices a single rounding counts for more.
TEST(NewtonSchulzTest, Bf16IsNearTheSameIterationInFp64) {
  ThreadTeam team(2);
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(::testing::Message() << shape.rows << " x " << shape.columns);
    const NewtonSchulz rule;
    const std::vector<double> matrix = Matrix(shape, 4);
    EXPECT_LT(
        Distance(Orthogonal<BFloat16>(team, rule, shape, matrix), Reference(rule, shape, matrix)),
        std::min(shape.rows, shape.columns) < 48 ? 5e-2 : 2e-2);
  }
}

// With Muon's coefficients singular values come between 0.68 and 1.14 (Jordan et al.), so that the
// rows of a wide matrix have nearly the squares 1.
TEST(NewtonSchulzTest, RowsBecomeNearlyOrthogonal) {
  ThreadTeam team(1);
  const Shape shape{48, 200};
  const std::vector<float> x = Orthogonal<float>(team, {}, shape, Matrix(shape, 5));
  for (int64_t i = 0; i < shape.rows; ++i) {
    for (int64_t j = 0; j < shape.rows; ++j) {
      double product = 0;
      for (int64_t k = 0; k < shape.columns; ++k)
        product += x[static_cast<size_t>(i * shape.columns + k)] *
                   x[static_cast<size_t>(j * shape.columns + k)];
      EXPECT_NEAR(product, i == j ? 1 : 0, 0.5) << i << ", " << j;
    }
  }
}

TEST(NewtonSchulzTest, ZerosStayZerosAndANanIsEverywhere) {
  ThreadTeam team(1);
  const Shape shape{6, 9};
  for (const float value : Orthogonal<float>(team, {}, shape, std::vector<double>(54, 0)))
    EXPECT_EQ(value, 0);
  std::vector<double> matrix = Matrix(shape, 6);
  matrix[7] = std::nan("");
  for (const float value : Orthogonal<float>(team, {}, shape, matrix))
    EXPECT_TRUE(std::isnan(value));
}

template <class T>
void ExpectSameBits() {
  ThreadTeam one(1), three(3);
  for (const Shape& shape : kShapes) {
    const std::vector<double> matrix = Matrix(shape, 7);
    std::vector<T> first;
    ForEveryTarget([&] {
      for (ThreadTeam* team : {&one, &three}) {
        const std::vector<T> result = Orthogonal<T>(*team, {}, shape, matrix);
        if (first.empty()) first = result;
        EXPECT_EQ(std::memcmp(first.data(), result.data(), first.size() * sizeof(T)), 0)
            << shape.rows << " x " << shape.columns;
      }
    });
  }
}

TEST(NewtonSchulzTest, BitsDependOnNeitherTargetNorTeam) {
  ExpectSameBits<float>();
  ExpectSameBits<BFloat16>();
}

// Larger than a tile, and than a block of k.
TEST(MatrixProductTest, IsAChainOfFusedMultiplyAdds) {
  constexpr int64_t kRows = 211, kColumns = 530, kDepth = 300;
  const auto numbers = [](int64_t count, unsigned seed) {
    std::vector<float> of;
    for (const double value : Matrix({1, count}, seed)) of.push_back(static_cast<float>(value));
    return of;
  };
  std::vector<float> a = numbers(kRows * kDepth, 1), b = numbers(kDepth * kColumns, 2),
                     c = numbers(kRows * kColumns, 3), out(c.size());
  ThreadTeam team(2);
  Multiply(team, {.rows = kRows,
                  .columns = kColumns,
                  .depth = kDepth,
                  .a = {a.data(), kDepth},
                  .b = {b.data(), kColumns},
                  .out = {out.data(), kColumns},
                  .c = {c.data(), kColumns},
                  .alpha = 0.5f,
                  .beta = -3});
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kColumns; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < kDepth; ++k)
        sum = std::fma(a[static_cast<size_t>(i * kDepth + k)],
                       b[static_cast<size_t>(k * kColumns + j)], sum);
      const auto at = static_cast<size_t>(i * kColumns + j);
      ASSERT_EQ(out[at], std::fma(-3.0f, c[at], 0.5f * sum)) << i << ", " << j;
    }
  }
}

TEST(NewtonSchulzOfTest, ScalesByTheShape) {
  OptimizerConfig muon{.type = OptimizerType::kMuon};
  EXPECT_EQ(NewtonSchulzOf(muon, 64, 16).scale, 2);
  EXPECT_EQ(NewtonSchulzOf(muon, 16, 64).scale, 1);
  muon.matches_adamw_size = true;
  EXPECT_EQ(NewtonSchulzOf(muon, 16, 64).scale, static_cast<float>(0.2 * 8));
}

}  // namespace
}  // namespace ebb::optim::newton_schulz_test
