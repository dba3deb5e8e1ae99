// Attention's forward pass on tensor cores. Scores stay in registers, and so does the output, which
// is scaled down whenever a larger score is found.
//
// Bytes: qkv is read once if its keys and values stay in the L2, the output is written once, and 4
// bytes for each query and head for log_sum_exp.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/attention_heads.h"
#include "ops/cuda/attention_plain.h"
#include "ops/cuda/attention_tiles.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {

// T: BFloat16 or Float16. kDepth: a head's width, rounded up to 64 or 128.
template <class T, int kDepth>
struct AttentionForward {
  using Arrays = AttentionWork;
  using Walk = QueryWalk<T, kDepth, /*kOwnTiles=*/1>;
  static constexpr int kThreads = Walk::kThreads, kSharedBytes = Walk::kSharedBytes;
  static constexpr int kQueries = Walk::kQueries, kRowTiles = Walk::kRowTiles, kKeys = Walk::kKeys;

  struct Softmax {
    typename Walk::OfRows largest;  // score so far
    typename Walk::OfRows sum;      // of exp(scale * (score - largest)), over this thread's columns
  };
  using Scores = float[kRowTiles][kKeys / 8][4];
  using Output = float[kRowTiles][kDepth / 8][4];

  template <class Launched>
  EBB_HOST_DEVICE static void Run(Launched& launched, const Arrays& arrays) {
    kernel::MatrixThread<Launched> thread(launched);
    const Walk walk(thread, arrays.qkv, arrays.shape);
    walk.CopyOwn(thread, 0, walk.rows.queries);
    walk.CopyKeys(thread, 0);
    WaitForTiles(thread);
    typename Walk::Left queries = {0, walk.warp_row, {}};
    queries.Hold(thread);

    Softmax softmax;
    Output output;
    for (int r = 0; r < kRowTiles; ++r) {
      for (int half = 0; half < 2; ++half)
        softmax.largest[r][half] = MinusInfinity(), softmax.sum[r][half] = 0;
    }
    Clear(output);
    // The warp's first query, relative to the first key of the tile.
    int row = walk.warp_first();
    for (int tile = 0; tile < walk.tiles; ++tile, row -= kKeys) {
      const int pair = Walk::PairOf(tile);
      if (tile + 1 < walk.tiles) walk.CopyKeys(thread, tile + 1);
      if (row + Walk::kWarpQueries > 0) {  // otherwise no key of the tile is seen
        Scores scores;
        MultiplyRows<T>(thread, queries, pair, 0, scores);
        if (row < kKeys - 1) SetLaterColumns(thread, row, MinusInfinity(), scores);
        Weigh(thread, walk.shape.scale_log2, softmax, output, scores);
        AddRowsTimes<T, kDepth>(thread, scores, pair + Walk::kTileBytes, 0, output);
      }
      WaitForTiles(thread);
    }
    Store(thread, arrays, walk.head, walk.warp_first(), walk.warp_row, softmax, output);
  }

 private:
  // Scores become exp(scale * (score - largest)). The sums so far are scaled to the new largest.
  template <class Thread>
  EBB_HOST_DEVICE static void Weigh(Thread& thread, float scale_log2, Softmax& softmax,
                                    Output& output, Scores& scores) {
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int half = 0; half < 2; ++half) {
        float largest = softmax.largest[r][half];
        const float before = largest;
        EBB_UNROLL
        for (int n = 0; n < kKeys / 8; ++n)
          largest = Larger(largest, Larger(scores[r][n][2 * half], scores[r][n][2 * half + 1]));
        largest = Larger(largest, thread.ShuffleXor(largest, 1));
        largest = Larger(largest, thread.ShuffleXor(largest, 2));
        softmax.largest[r][half] = largest;
        const float offset = -largest * scale_log2;
        const float factor = Exp2(Fma(before, scale_log2, offset));
        float sum = softmax.sum[r][half] * factor;
        EBB_UNROLL
        for (int n = 0; n < kKeys / 8; ++n) {
          EBB_UNROLL
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            scores[r][n][i] = Exp2(Fma(scores[r][n][i], scale_log2, offset));
            sum += scores[r][n][i];
          }
        }
        softmax.sum[r][half] = sum;
        EBB_UNROLL
        for (int n = 0; n < kDepth / 8; ++n) {
          output[r][n][2 * half] *= factor;
          output[r][n][2 * half + 1] *= factor;
        }
      }
    }
  }

  template <class Thread>
  EBB_HOST_DEVICE static void Store(Thread& thread, const Arrays& arrays, int head, int first,
                                    int warp_row, const Softmax& softmax, Output& output) {
    const HeadShape& shape = arrays.shape;
    const int group = thread.lane() / 4, pair = thread.lane() % 4;
    EBB_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      EBB_UNROLL
      for (int half = 0; half < 2; ++half) {
        float sum = softmax.sum[r][half];
        sum += thread.ShuffleXor(sum, 1);
        sum += thread.ShuffleXor(sum, 2);
        const float share = 1 / sum;
        EBB_UNROLL
        for (int n = 0; n < kDepth / 8; ++n) {
          output[r][n][2 * half] *= share;
          output[r][n][2 * half + 1] *= share;
        }
        const int query = first + 16 * r + 8 * half + group;
        if (pair == 0 && query < shape.tokens) {
          arrays.log_sum_exp[int64_t{head} * shape.tokens + query] =
              Fma(softmax.largest[r][half], shape.scale, std::log(sum));
        }
      }
    }
    StoreRows<T, kDepth>(thread, output, 0, warp_row,
                         OutputOf(arrays.output, sizeof(T), head, shape), first, shape);
  }
};

namespace {

template <class Kernel>
cudaError_t Launch(cudaStream_t stream, int64_t bytes, int64_t tile_rows,
                   const AttentionArrays& x) {
  const HeadShape shape = ShapeOf(x.sequences, x.tokens, x.heads, x.width, bytes, tile_rows);
  return kernel::LaunchKernel<Kernel>(
      stream, {.blocks = shape.head_count() * shape.tiles, .shared_bytes = Kernel::kSharedBytes},
      {.shape = shape,
       .qkv = static_cast<const char*>(x.qkv),
       .output = static_cast<char*>(x.output),
       .log_sum_exp = x.log_sum_exp});
}

template <class T, int kDepth>
cudaError_t LaunchTiled(cudaStream_t stream, const AttentionArrays& x) {
  using Kernel = AttentionForward<T, kDepth>;
  return Launch<Kernel>(stream, sizeof(T), Kernel::kQueries, x);
}

template <class T>
cudaError_t LaunchPlain(cudaStream_t stream, const AttentionArrays& x) {
  return Launch<PlainAttentionForward<T>>(stream, sizeof(T), Plain::kRows, x);
}

template <class T>
cudaError_t LaunchOf(cudaStream_t stream, const AttentionArrays& x) {
  if constexpr (!std::is_same_v<T, float>) {
    switch (TiledDepth(x.width / x.heads, x.qkv, x.output)) {
      case 64:
        return LaunchTiled<T, 64>(stream, x);
      case 128:
        return LaunchTiled<T, 128>(stream, x);
      default:
        break;
    }
  }
  return LaunchPlain<T>(stream, x);
}

}  // namespace

cudaError_t LoadAttentionKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    using T = decltype(type);
    if constexpr (std::is_same_v<T, float>) {
      return kernel::LoadKernels<PlainAttentionForward<T>>();
    } else {
      return kernel::LoadKernels<AttentionForward<T, 64>, AttentionForward<T, 128>,
                                 PlainAttentionForward<T>>();
    }
  });
}

cudaError_t LaunchAttention(cudaStream_t stream, DType dtype, const AttentionArrays& arrays) {
  if (arrays.sequences * arrays.tokens == 0) return cudaSuccess;
  return WithType(dtype, [&](auto type) { return LaunchOf<decltype(type)>(stream, arrays); });
}

}  // namespace ebb::gpt::cuda
