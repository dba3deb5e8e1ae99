// Owners of Muon's matrices, and the parts of matrices that ranks exchange.
#include "ebb/sharding/matrices.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "ebb/runtime/base/newton_schulz_work.h"
#include "tests/status.h"

namespace ebb::sharding::matrices_test {
namespace {

// A block as Llama's: q, k, v, o, up, gate, down; and one with fused and stacked matrices.
ModelSpec Blocks(int blocks) {
  ModelSpec model;
  const auto add = [&](UnitId unit, const char* name, std::vector<int64_t> shape,
                       std::vector<int64_t> rows = {}) {
    model.Add(unit, {.name = name + std::to_string(static_cast<int>(unit)),
                     .shape = std::move(shape),
                     .init = Constant(0),
                     .matrix_update = MatrixUpdate::kYes,
                     .matrix_rows = std::move(rows)});
  };
  for (int block = 0; block < blocks; ++block) {
    const UnitId unit = model.AddUnit("block" + std::to_string(block));
    for (const char* name : {"q", "k", "v", "o"}) add(unit, name, {64, 64});
    for (const char* name : {"up", "gate"}) add(unit, name, {172, 64});
    add(unit, "down", {64, 172});
    model.forward.push_back({.unit = unit});
  }
  const UnitId other = model.AddUnit("other");
  add(other, "qkv", {3 * 40, 30}, {40, 60, 20});
  add(other, "experts", {5, 17, 9});
  model.forward.push_back({.unit = other});
  return DivideByDType(std::move(model), DType::kFloat32);
}

TEST(MatricesTest, EachMatrixHasItsShape) {
  const ModelSpec model = Blocks(1);
  const auto shapes = [&](size_t parameter) {
    std::vector<std::pair<int64_t, int64_t>> of;
    for (const MatrixShape& shape : MatricesOf(model.parameters[parameter]))
      of.emplace_back(shape.rows, shape.columns);
    return of;
  };
  using Shapes = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(shapes(4), (Shapes{{172, 64}}));
  EXPECT_EQ(shapes(7), (Shapes{{40, 30}, {60, 30}, {20, 30}}));
  EXPECT_EQ(shapes(8), (Shapes(5, {17, 9})));
}

TEST(MatricesTest, OwnersHaveEqualWork) {
  for (const int ranks : {2, 3, 4, 8}) {
    const ModelSpec model = Blocks(12);
    ASSERT_OK_AND_ASSIGN(const ModelLayout layout, LayOut(model, ranks));
    std::vector<double> total(static_cast<size_t>(ranks), 0);
    double largest = 0;
    for (const auto& matrices : OwnMatrices(model, layout, /*is_exchanged=*/true)) {
      std::vector<double> load(static_cast<size_t>(ranks), 0);
      for (const OwnedMatrix& matrix : matrices) {
        const double work = NewtonSchulzOperations(matrix.rows, matrix.columns, 1, false);
        load[static_cast<size_t>(matrix.owner)] += work;
        total[static_cast<size_t>(matrix.owner)] += work;
        largest = std::max(largest, work);
        for (const OwnedMatrix& other : matrices) {
          if (&other == &matrix || other.owner != matrix.owner) continue;
          EXPECT_TRUE(other.at >= matrix.at + matrix.count() ||
                      matrix.at >= other.at + other.count());
        }
      }
      const auto [least, most] = std::minmax_element(load.begin(), load.end());
      EXPECT_LE(*most - *least, largest) << ranks << " ranks";
    }
    const auto [least, most] = std::minmax_element(total.begin(), total.end());
    EXPECT_LE(*most, 1.25 * *least + largest) << ranks << " ranks";
  }
}

TEST(MatricesTest, PartsCoverEachMatrixOnce) {
  for (const int ranks : {2, 3, 5, 64}) {
    const ModelSpec model = Blocks(1);
    ASSERT_OK_AND_ASSIGN(const ModelLayout layout, LayOut(model, ranks));
    const auto of_units = OwnMatrices(model, layout, /*is_exchanged=*/true);
    for (size_t unit = 0; unit < of_units.size(); ++unit) {
      const std::vector<OwnedMatrix>& matrices = of_units[unit];
      const int64_t shard = layout.units[unit].trainable.shard;
      std::vector<int64_t> covered(matrices.size(), 0), received(static_cast<size_t>(ranks), 0);
      std::pair<int, int> before;
      for (const MatrixPart& part : PartsOf(matrices, shard, ranks)) {
        EXPECT_GT(part.count(), 0);
        EXPECT_GE(part.begin, part.slice * shard);
        EXPECT_LE(part.end, (part.slice + 1) * shard);
        const std::pair<int, int> now(part.slice, part.matrix->owner);
        EXPECT_GE(now, before);
        before = now;
        covered[static_cast<size_t>(part.matrix - matrices.data())] += part.count();
        if (part.slice != part.matrix->owner)
          received[static_cast<size_t>(part.matrix->owner)] += part.count();
      }
      for (size_t i = 0; i < matrices.size(); ++i) EXPECT_EQ(covered[i], matrices[i].count());
      EXPECT_EQ(ExchangedElements(matrices, shard, ranks),
                *std::max_element(received.begin(), received.end()));
    }
  }
}

TEST(MatricesTest, ARankThatHasAllComputesInPlace) {
  const ModelSpec model = Blocks(1);
  ASSERT_OK_AND_ASSIGN(const ModelLayout layout, LayOut(model, 4));
  for (const auto& matrices : OwnMatrices(model, layout, /*is_exchanged=*/false)) {
    for (const OwnedMatrix& matrix : matrices) {
      EXPECT_EQ(matrix.owner, 0);
      EXPECT_EQ(matrix.at, matrix.begin);
    }
  }
}

}  // namespace
}  // namespace ebb::sharding::matrices_test
