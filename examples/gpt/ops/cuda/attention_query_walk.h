// How blocks of tiled attention walk that have kQueries queries of a head, forward and for the
// queries' gradients: over the keys and values that these queries see, a pair of tiles after the
// other, the next on its way while one is multiplied.
//
//   shared memory   [ rows of the queries, kOwnTiles | keys, values | keys, values ]
#pragma once

#include <cstdint>

#include "ops/cuda/attention_heads.h"
#include "ops/cuda/attention_tiles.h"

namespace ebb::gpt::cuda {

// T: BFloat16 or Float16. kDepth: a head's width, rounded up to 64 or 128. kOwnTiles: how many tiles
// with a row a query the block has, the queries first.
template <class T, int kDepth, int kOwnTiles>
struct QueryWalk {
  static constexpr int kWarps = 4, kThreads = kWarps * kernel::kWarp;
  // Two row tiles a warp: each part of a key or value that is loaded from shared memory is used twice.
  static constexpr int kRowTiles = 2, kWarpQueries = 16 * kRowTiles;
  static constexpr int kQueries = kWarps * kWarpQueries;
  static constexpr int kKeys = kDepth <= 64 ? 64 : 32;  // as many scores as registers hold
  static constexpr bool kHeld = kDepth <= 64;

  using Layout = TileLayout<kDepth>;
  static constexpr int kRowsBytes = Layout::Bytes(kQueries), kPair = kOwnTiles * kRowsBytes;
  static constexpr int kTileBytes = Layout::Bytes(kKeys), kPairBytes = 2 * kTileBytes;
  static constexpr int kSharedBytes = kPair + 2 * kPairBytes;

  using Left = LeftRows<kDepth, kRowTiles, kHeld>;
  // A number of each of a thread's rows: those of its group and 8 further down, of each row tile.
  using OfRows = float[kRowTiles][2];

  const HeadShape& shape;
  int head, first;  // the block's first query
  int tiles;        // of keys that it sees
  int warp_row;     // of the warp's first query, among the block's
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

  // Begin to copy: rows of the block's queries, the `own`-th tile; a tile's keys and values.
  template <class Thread>
  EBB_HOST_DEVICE void CopyOwn(Thread& thread, int own, const HeadRows<const char>& from) const {
    CopyTile<kDepth, kQueries, kThreads>(thread, own * kRowsBytes, from, first, shape);
  }
  template <class Thread>
  EBB_HOST_DEVICE void CopyKeys(Thread& thread, int tile) const {
    CopyPair<kDepth, kKeys, kThreads>(thread, PairOf(tile), rows.keys, rows.values, tile * kKeys,
                                      shape);
  }
  // Where it has them: keys, and kTileBytes further on values.
  EBB_HOST_DEVICE static int PairOf(int tile) { return kPair + tile % 2 * kPairBytes; }

  // The warp's rows, of a head's: the token that the first of them is.
  EBB_HOST_DEVICE int warp_first() const { return first + warp_row; }
};

}  // namespace ebb::gpt::cuda
