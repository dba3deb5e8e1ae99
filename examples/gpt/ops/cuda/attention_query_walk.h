// How blocks of tiled attention with kQueries queries of a head walk, in forward and for the
// queries' gradients: over the keys and values that these queries see, one pair of tiles after the
// other. The next pair is loaded while one is multiplied.
//
//   shared memory   [ rows of the queries, kOwnTiles | keys, values | keys, values ]
#pragma once

#include <cstdint>

#include "ops/cuda/attention_heads.h"
#include "ops/cuda/attention_tiles.h"

namespace ebb::gpt::cuda {

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
