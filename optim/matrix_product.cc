#include "ebb/optim/matrix_product.h"

#include <algorithm>
#include <cassert>
#include <memory>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/matrix_product.cc"
#include "ebb/optim/simd_targets.h"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd-inl.h"
#include "hwy/highway.h"

#ifndef EBB_OPTIM_MATRIX_PRODUCT_ONCE
#define EBB_OPTIM_MATRIX_PRODUCT_ONCE
namespace ebb::optim {

// A thread computes a tile of the result. It goes over k in blocks, and packs what a block needs of
// a and b, widened to fp32, into panels that the innermost loop reads end to end.
//
//   a  rows      | panel of kPanelRows  |  k0 r0 r1 ... r5 | k1 r0 ...
//   b  columns   | panel of two vectors |  k0 c0 c1 ...    | k1 c0 ...
inline constexpr int64_t kTileRows = 192, kTileColumns = 512, kBlockDepth = 256, kPanelRows = 6;
static_assert(kTileRows % kPanelRows == 0);

struct TileMemory {
  alignas(64) float a[kTileRows * kBlockDepth];
  alignas(64) float b[kTileColumns * kBlockDepth];
  alignas(64) float sums[kTileRows * kTileColumns];
};
// Each thread that multiplies keeps one.
inline TileMemory& TileMemoryOfThread() {
  static thread_local const std::unique_ptr<TileMemory> memory = std::make_unique<TileMemory>();
  return *memory;
}

// Rows and columns [begin, end) of the result.
struct Tile {
  int64_t row = 0, rows = 0, column = 0, columns = 0;
};

}  // namespace ebb::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

#if EBB_VECTOR_OPS
using Ops = VectorOps<hn::ScalableTag<float>>;
constexpr int64_t kLanes = Ops::kLanes;
#else
using Ops = ScalarOps;
constexpr int64_t kLanes = 1;
#endif
constexpr int64_t kPanelColumns = 2 * kLanes;
static_assert(kTileColumns % kPanelColumns == 0);

// A panel of `width` lines, of which `lines` are there. Lines lie `line_stride` apart, the elements
// of a line `stride`.
template <class T>
void PackPanel(const T* from, int64_t lines, int64_t line_stride, int64_t stride, int64_t depth,
               int64_t width, float* panel) {
#if EBB_VECTOR_OPS
  if (line_stride == 1 && lines == kPanelColumns && width == kPanelColumns) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t v = 0; v < kPanelColumns; v += kLanes) {
        Ops::Store<Rounding::kNearest>(Ops::Load(from + k * stride + v),
                                       panel + k * kPanelColumns + v);
      }
    }
    return;
  }
#endif
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t k = 0; k < depth; ++k)
      panel[k * width + line] = ScalarOps::Load(from + line * line_stride + k * stride);
  }
  for (int64_t line = lines; line < width; ++line)
    for (int64_t k = 0; k < depth; ++k) panel[k * width + line] = 0;
}

// Adds the products of two panels to their part of the tile's sums.
HWY_INLINE void MultiplyPanels(const float* a, const float* b, int64_t depth, float* sums) {
  typename Ops::Number first[kPanelRows], second[kPanelRows];
  for (int64_t r = 0; r < kPanelRows; ++r) {
    first[r] = Ops::Load(sums + r * kTileColumns);
    second[r] = Ops::Load(sums + r * kTileColumns + kLanes);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const auto b0 = Ops::Load(b + k * kPanelColumns),
               b1 = Ops::Load(b + k * kPanelColumns + kLanes);
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const auto a0 = Ops::Set(a[k * kPanelRows + r]);
      first[r] = Ops::Fma(a0, b0, first[r]);
      second[r] = Ops::Fma(a0, b1, second[r]);
    }
  }
  for (int64_t r = 0; r < kPanelRows; ++r) {
    Ops::Store<Rounding::kNearest>(first[r], sums + r * kTileColumns);
    Ops::Store<Rounding::kNearest>(second[r], sums + r * kTileColumns + kLanes);
  }
}

template <class T>
T* At(const MatrixView& view, int64_t row, int64_t column) {
  return static_cast<T*>(view.data) + row * view.row_stride + column * view.column_stride;
}

template <class T>
void MultiplyBlock(const Product& product, const Tile& tile, int64_t k, int64_t depth,
                   TileMemory& memory) {
  for (int64_t row = 0; row < tile.rows; row += kPanelRows) {
    PackPanel(At<const T>(product.a, tile.row + row, k), std::min(kPanelRows, tile.rows - row),
              product.a.row_stride, product.a.column_stride, depth, kPanelRows,
              memory.a + row * depth);
  }
  for (int64_t column = 0; column < tile.columns; column += kPanelColumns) {
    PackPanel(At<const T>(product.b, k, tile.column + column),
              std::min(kPanelColumns, tile.columns - column), product.b.column_stride,
              product.b.row_stride, depth, kPanelColumns, memory.b + column * depth);
  }
  for (int64_t column = 0; column < tile.columns; column += kPanelColumns) {
    for (int64_t row = 0; row < tile.rows; row += kPanelRows) {
      MultiplyPanels(memory.a + row * depth, memory.b + column * depth, depth,
                     memory.sums + row * kTileColumns + column);
    }
  }
}

// Copies what the tile has above the diagonal to below it.
template <class T>
void Mirror(const MatrixView& matrix, const Tile& tile) {
  for (int64_t column = tile.column; column < tile.column + tile.columns; ++column) {
    const T* const from = At<T>(matrix, 0, column);
    T* const to = At<T>(matrix, column, 0);
    for (int64_t row = tile.row; row < std::min(column, tile.row + tile.rows); ++row)
      to[row * matrix.column_stride] = from[row * matrix.row_stride];
  }
}

template <class T>
void MultiplyTile(const Product& product, const Tile& tile) {
  TileMemory& memory = TileMemoryOfThread();
  const int64_t panels = (tile.columns + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
  for (int64_t row = 0; row < (tile.rows + kPanelRows - 1) / kPanelRows * kPanelRows; ++row)
    std::fill_n(memory.sums + row * kTileColumns, panels, 0.0f);
  for (int64_t k = 0; k < product.depth; k += kBlockDepth)
    MultiplyBlock<T>(product, tile, k, std::min(kBlockDepth, product.depth - k), memory);
  const bool adds = product.c.data != nullptr;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t first = product.symmetric ? tile.row + row - tile.column : 0;
    for (int64_t column = std::max<int64_t>(0, first); column < tile.columns; ++column) {
      float value = product.alpha * memory.sums[row * kTileColumns + column];
      if (adds) {
        const T* const c = At<const T>(product.c, tile.row + row, tile.column + column);
        value = ScalarOps::Fma(product.beta, ScalarOps::Load(c), value);
      }
      ScalarOps::Store<Rounding::kNearest>(
          value, At<T>(product.out, tile.row + row, tile.column + column));
    }
  }
  if (product.symmetric) Mirror<T>(product.out, tile);
}

void MultiplyTileOnTarget(const Product& product, const Tile& tile) {
  if (product.dtype == DType::kBFloat16) return MultiplyTile<BFloat16>(product, tile);
  MultiplyTile<float>(product, tile);
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

HWY_EXPORT(MultiplyTileOnTarget);

}  // namespace

void Multiply(ThreadTeam& team, const Product& product) {
  assert(product.dtype == DType::kFloat32 || product.dtype == DType::kBFloat16);
  // Smaller tiles where the matrix has few, so that every thread has some. Of symmetric ones, half
  // of the tiles are left out: smaller tiles leave out more.
  const int64_t enough = (product.symmetric ? 12 : 4) * team.threads();
  int64_t rows = kTileRows, columns = kTileColumns;
  const auto tiles = [&] {
    return ((product.rows + rows - 1) / rows) * ((product.columns + columns - 1) / columns);
  };
  while (tiles() < enough && columns > 64) {
    columns /= 2;
    if (tiles() < enough && rows > 4 * kPanelRows) rows /= 2;
  }
  const int64_t across = (product.columns + columns - 1) / columns,
                down = (product.rows + rows - 1) / rows;
  team.Run(tiles(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      // From the first and the last row in turns: a row and its counterpart have the same work in a
      // symmetric product, too.
      const int64_t turn = t / across, row = turn % 2 == 0 ? turn / 2 : down - 1 - turn / 2;
      Tile tile{.row = row * rows, .column = t % across * columns};
      tile.rows = std::min(rows, product.rows - tile.row);
      tile.columns = std::min(columns, product.columns - tile.column);
      if (product.symmetric && tile.column + tile.columns <= tile.row) continue;
      HWY_DYNAMIC_DISPATCH(MultiplyTileOnTarget)(product, tile);
    }
  });
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
