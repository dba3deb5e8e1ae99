// Tiles of a head's rows in shared memory, and products of them on tensor cores.
//
// A tile's row is kDepth numbers of 16 bits, in chunks of 8. The row's number permutes its chunks.
// So one chunk of each of 8 consecutive rows covers all 32 banks once, both in the copy to the tile
// and in a load as a matrix.
#pragma once

#include <cstdint>

#include "ebb/runtime/device/cuda/matrix_thread.h"
#include "ops/cuda/attention_heads.h"

namespace ebb::gpt::cuda {

inline constexpr int kChunkBytes = 16;
inline constexpr int kChunkNumbers = 8;

template <int kDepth>
struct TileLayout {
  static_assert(kDepth % 64 == 0);  // so that all rows begin in the same bank
  static constexpr int kChunks = kDepth / kChunkNumbers, kRowBytes = kChunks * kChunkBytes;
  static constexpr int kSwapped = 8;  // chunks that are permuted among each other

  static constexpr int Bytes(int rows) { return rows * kRowBytes; }

  // Where a chunk begins, from the tile's begin.
  static EBB_HOST_DEVICE int Place(int row, int chunk) {
    return row * kRowBytes + (chunk ^ row % kSwapped) * kChunkBytes;
  }
  // From the place of chunk 0 or 1 of a row to that of the chunk 2 * step further on.
  static EBB_HOST_DEVICE int Step(int place, int step) {
    constexpr int kSteps = kSwapped / 2;
    return (place ^ step % kSteps * 2 * kChunkBytes) + step / kSteps * kSwapped * kChunkBytes;
  }
};

// Begins to copy rows [first, first + kRows) of a head to a tile, with zeros beyond the last token
// and the head's width.
template <int kDepth, int kRows, int kThreads, class Thread>
EBB_HOST_DEVICE void CopyTile(Thread& thread, int tile, const HeadRows<const char>& rows, int first,
                              const HeadShape& shape) {
  using Layout = TileLayout<kDepth>;
  // Rows at a time, by as many threads as have a chunk, so that a thread's chunk is always at the
  // same place.
  constexpr int kRowsPerPass = kThreads / Layout::kChunks / 8 * 8;
  static_assert(kRows % kRowsPerPass == 0);
  const int row = thread.index() / Layout::kChunks, chunk = thread.index() % Layout::kChunks;
  if (row >= kRowsPerPass) return;
  const int to = thread.Opaque(tile + Layout::Place(row, chunk));
  const char* from = thread.Opaque(rows.Row(first + row) + chunk * kChunkBytes);
  const int left =
      chunk * kChunkNumbers < shape.depth ? static_cast<int>(shape.tokens) - first - row : 0;
  EBB_UNROLL
  for (int pass = 0; pass < kRows; pass += kRowsPerPass) {
    thread.CopyAsync(to + pass * Layout::kRowBytes, from, pass < left);
    from += kRowsPerPass * rows.stride;
  }
}

// Copies the same rows of two matrices, one tile after the other, as a group.
template <int kDepth, int kRows, int kThreads, class Thread>
EBB_HOST_DEVICE void CopyPair(Thread& thread, int pair, const HeadRows<const char>& a,
                              const HeadRows<const char>& b, int first, const HeadShape& shape) {
  CopyTile<kDepth, kRows, kThreads>(thread, pair, a, first, shape);
  CopyTile<kDepth, kRows, kThreads>(thread, pair + TileLayout<kDepth>::Bytes(kRows), b, first,
                                    shape);
  thread.CommitCopies();
}
// After it all threads see what was copied, and have finished their earlier reads.
template <class Thread>
EBB_HOST_DEVICE void WaitForTiles(Thread& thread) {
  thread.template WaitForCopies<0>();
  thread.Sync();
}

// The place in a tile of a lane's row, for matrices that together have 16 rows and the tile's first
// 16 columns. Other columns are Step away; rows further down, by a multiple of 8, are kRowBytes
// away for each row.
//
// The first two matrices are under one another. They are a product's left side; or, transposed, two
// right sides (words 0, 1 and 2, 3) of a product that sums down the tile's columns.
template <int kDepth, class Thread>
EBB_HOST_DEVICE int PlaceOfColumns(Thread& thread, int row) {
  const int lane = thread.lane();
  return thread.Opaque(TileLayout<kDepth>::Place(row + lane % 16, lane / 16));
}
// The first two are side by side: two right sides of a product that sums along the tile's rows.
template <int kDepth, class Thread>
EBB_HOST_DEVICE int PlaceOfRows(Thread& thread, int row) {
  const int lane = thread.lane();
  return thread.Opaque(TileLayout<kDepth>::Place(row + lane / 16 * 8 + lane % 8, lane / 8 % 2));
}

// The left side of products that a warp repeats: 16 * kRowTiles rows of a tile, kept in registers
// or loaded each time.
template <int kDepth, int kRowTiles, bool kHeld>
struct LeftRows {
  using Layout = TileLayout<kDepth>;
  int tile, row;
  uint32_t words[kHeld ? kRowTiles : 1][kHeld ? kDepth / 16 : 1][4];

  // Call it once the tile is loaded.
  template <class Thread>
  EBB_HOST_DEVICE void Hold(Thread& thread) {
    if constexpr (kHeld) {
      const int place = PlaceOfColumns<kDepth>(thread, row);
      EBB_UNROLL
      for (int k = 0; k < kDepth / 16; ++k) {
        EBB_UNROLL
        for (int r = 0; r < kRowTiles; ++r)
          thread.LoadMatrices(tile + Layout::Step(place, k) + 16 * r * Layout::kRowBytes,
                              words[r][k]);
      }
    }
  }
  // Columns [16 * k, 16 * k + 16).
  template <class Thread>
  EBB_HOST_DEVICE void Get(Thread& thread, int k, uint32_t (&a)[kRowTiles][4]) const {
    if constexpr (kHeld) {
      EBB_UNROLL
      for (int r = 0; r < kRowTiles; ++r) {
        EBB_UNROLL
        for (int i = 0; i < 4; ++i) a[r][i] = words[r][k][i];
      }
    } else {
      const int place = tile + Layout::Step(PlaceOfColumns<kDepth>(thread, row), k);
      EBB_UNROLL
      for (int r = 0; r < kRowTiles; ++r)
        thread.LoadMatrices(place + 16 * r * Layout::kRowBytes, a[r]);
    }
  }
};

// A warp's product of 16 * kRowTiles rows and 8 * kColumns columns, with parts as in MatrixThread.
template <int kRowTiles, int kColumns>
EBB_HOST_DEVICE void Clear(float (&product)[kRowTiles][kColumns][4]) {
  EBB_UNROLL
  for (int r = 0; r < kRowTiles; ++r) {
    EBB_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      EBB_UNROLL
      for (int i = 0; i < 4; ++i) product[r][n][i] = 0;
    }
  }
}
template <int kRowTiles, int kColumns>
EBB_HOST_DEVICE void Scale(float factor, float (&product)[kRowTiles][kColumns][4]) {
  EBB_UNROLL
  for (int r = 0; r < kRowTiles; ++r) {
    EBB_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      EBB_UNROLL
      for (int i = 0; i < 4; ++i) product[r][n][i] *= factor;
    }
  }
}

// Sets numbers of a product to `value` if their column's token is later than their row's; the first
// row is `ahead` tokens after the first column.
template <int kRowTiles, int kColumns, class Thread>
EBB_HOST_DEVICE void SetLaterColumns(Thread& thread, int ahead, float value,
                                     float (&product)[kRowTiles][kColumns][4]) {
  // For the thread's first number; its other numbers are a constant away.
  const int own = ahead + thread.lane() / 4 - 2 * (thread.lane() % 4);
  EBB_UNROLL
  for (int r = 0; r < kRowTiles; ++r) {
    EBB_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      EBB_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (8 * n + i % 2 - 16 * r - i / 2 * 8 > own) product[r][n][i] = value;
      }
    }
  }
}

// product = left times the transpose of rows [row, row + 8 * kColumns) of a tile: each row of the
// one with each row of the other.
template <class T, int kDepth, int kRowTiles, int kColumns, bool kHeld, class Thread>
EBB_HOST_DEVICE void MultiplyRows(Thread& thread, const LeftRows<kDepth, kRowTiles, kHeld>& left,
                                  int tile, int row, float (&product)[kRowTiles][kColumns][4]) {
  using Layout = TileLayout<kDepth>;
  Clear(product);
  const int place = PlaceOfRows<kDepth>(thread, row);
  EBB_UNROLL
  for (int k = 0; k < kDepth / 16; ++k) {
    uint32_t a[kRowTiles][4];
    left.Get(thread, k, a);
    EBB_UNROLL
    for (int n = 0; n < kColumns; n += 2) {
      uint32_t b[4];
      thread.LoadMatrices(tile + Layout::Step(place, k) + 8 * n * Layout::kRowBytes, b);
      EBB_UNROLL
      for (int r = 0; r < kRowTiles; ++r) {
        thread.template MultiplyAdd<T>(product[r][n], a[r], b[0], b[1]);
        thread.template MultiplyAdd<T>(product[r][n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// product += left, rounded to T, times rows [row, row + 8 * kSummed) of a tile; left comes from
// MultiplyRows.
template <class T, int kDepth, int kRowTiles, int kSummed, class Thread>
EBB_HOST_DEVICE void AddRowsTimes(Thread& thread, const float (&left)[kRowTiles][kSummed][4],
                                  int tile, int row, float (&product)[kRowTiles][kDepth / 8][4]) {
  using Layout = TileLayout<kDepth>;
  const int place = PlaceOfColumns<kDepth>(thread, row);
  EBB_UNROLL
  for (int k = 0; k < kSummed; k += 2) {
    uint32_t a[kRowTiles][4];
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float(&c)[4] = left[r][k + i / 2];
        a[r][i] = kernel::PackPair<T>(c[i % 2 * 2], c[i % 2 * 2 + 1]);
      }
    }
    EBB_UNROLL
    for (int n = 0; n < kDepth / 8; n += 2) {
      uint32_t b[4];
      thread.LoadMatricesTransposed(tile + Layout::Step(place, n / 2) + 8 * k * Layout::kRowBytes,
                                    b);
      EBB_UNROLL
      for (int r = 0; r < kRowTiles; ++r) {
        thread.template MultiplyAdd<T>(product[r][n], a[r], b[0], b[1]);
        thread.template MultiplyAdd<T>(product[r][n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// Writes a warp's product to rows [first, ...) of a head, but not past the last token. It goes
// through rows of a tile that only this warp uses, so that memory gets whole chunks.
template <class T, int kDepth, int kRowTiles, class Thread>
EBB_HOST_DEVICE void StoreRows(Thread& thread, const float (&product)[kRowTiles][kDepth / 8][4],
                               int tile, int tile_row, const HeadRows<char>& rows, int first,
                               const HeadShape& shape) {
  using Layout = TileLayout<kDepth>;
  struct alignas(kChunkBytes) Chunk {
    uint32_t words[4];
  };
  const int lane = thread.lane(), group = lane / 4, pair = lane % 4;
  thread.SyncWarp();
  EBB_UNROLL
  for (int r = 0; r < kRowTiles; ++r) {
    EBB_UNROLL
    for (int n = 0; n < kDepth / 8; ++n) {
      EBB_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = tile_row + 16 * r + 8 * half + group;
        *reinterpret_cast<uint32_t*>(thread.shared() + tile + Layout::Place(row, n) + 4 * pair) =
            kernel::PackPair<T>(product[r][n][2 * half], product[r][n][2 * half + 1]);
      }
    }
  }
  thread.SyncWarp();
  EBB_UNROLL
  for (int pass = 0; pass < 16 * kRowTiles * Layout::kChunks / kernel::kWarp; ++pass) {
    const int i = pass * kernel::kWarp + lane;
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    if (first + row < shape.tokens && chunk * kChunkNumbers < shape.depth) {
      *reinterpret_cast<Chunk*>(rows.Row(first + row) + chunk * kChunkBytes) =
          *reinterpret_cast<const Chunk*>(thread.shared() + tile +
                                          Layout::Place(tile_row + row, chunk));
    }
  }
}

// How blocks of tiled attention with kQueries queries of a head walk, in forward and for the
// queries' gradients: over the keys and values that these queries see, one pair of tiles after the
// other. The next pair is loaded while one is multiplied.
//
//   shared memory   [ rows of the queries, kOwnTiles | keys, values | keys, values ]
//
// T: BFloat16 or Float16. kDepth: a head's width, rounded up to 64 or 128. kOwnTiles: the number of
// tiles in which the block has a row for each query; the queries are first.
template <class T, int kDepth, int kOwnTiles>
struct QueryWalk {
  static constexpr int kWarps = 4, kThreads = kWarps * kernel::kWarp;
  // Two row tiles for each warp, so that each part of a key or value is loaded from shared memory
  // for two uses.
  static constexpr int kRowTiles = 2, kWarpQueries = 16 * kRowTiles;
  static constexpr int kQueries = kWarps * kWarpQueries;
  static constexpr int kKeys = kDepth <= 64 ? 64 : 32;  // as many scores as registers hold
  static constexpr bool kHeld = kDepth <= 64;

  using Layout = TileLayout<kDepth>;
  static constexpr int kRowsBytes = Layout::Bytes(kQueries), kPair = kOwnTiles * kRowsBytes;
  static constexpr int kTileBytes = Layout::Bytes(kKeys), kPairBytes = 2 * kTileBytes;
  static constexpr int kSharedBytes = kPair + 2 * kPairBytes;

  using Left = LeftRows<kDepth, kRowTiles, kHeld>;
  // A number for each of a thread's rows: in each row tile its group's row, and the one 8 rows
  // below.
  using OfRows = float[kRowTiles][2];

  const HeadShape& shape;
  int head, first;  // the block's first query
  int tiles;        // of keys that the block sees
  int warp_row;     // of the warp's first query, in the block
  QkvRows<const char> rows;

  template <class Thread>
  EBB_HOST_DEVICE QueryWalk(const Thread& thread, const char* qkv, const HeadShape& of)
      : shape(of) {
    const BlockPlace place = PlaceOf(thread.block(), shape);
    head = place.head;
    first = (static_cast<int>(shape.tiles) - 1 - place.tile) * kQueries;
    const int tokens = static_cast<int>(shape.tokens);
    const int end = first + kQueries < tokens ? first + kQueries : tokens;
    tiles = (end + kKeys - 1) / kKeys;
    warp_row = thread.warp() * kWarpQueries;
    rows = QkvOf(qkv, sizeof(T), head, shape);
  }

  // Begin copies: rows of the block's queries to the `own`-th tile; a tile's keys and values.
  template <class Thread>
  EBB_HOST_DEVICE void CopyOwn(Thread& thread, int own, const HeadRows<const char>& from) const {
    CopyTile<kDepth, kQueries, kThreads>(thread, own * kRowsBytes, from, first, shape);
  }
  template <class Thread>
  EBB_HOST_DEVICE void CopyKeys(Thread& thread, int tile) const {
    CopyPair<kDepth, kKeys, kThreads>(thread, PairOf(tile), rows.keys, rows.values, tile * kKeys,
                                      shape);
  }
  // Where they go: keys, and values kTileBytes further on.
  EBB_HOST_DEVICE static int PairOf(int tile) { return kPair + tile % 2 * kPairBytes; }

  // The token of the warp's first row.
  EBB_HOST_DEVICE int warp_first() const { return first + warp_row; }
};

}  // namespace ebb::gpt::cuda
