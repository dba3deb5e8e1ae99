// The embedding and its gradient: kernels.h.
#include <cstdint>
#include <limits>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {

// A warp has a row.
template <class T, int kWidth>
struct EmbedKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / kernel::kWarp;
  static constexpr int kMany = 4;  // groups of a lane with loads in flight together
  using Arrays = EmbedArrays;

  static int64_t Blocks(int64_t rows) { return Ceil(rows, kWarps); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t row = thread.block() * kWarps + thread.warp();
    if (row >= a.sequences * a.tokens) return;
    constexpr int kStride = kernel::kWarp * kWidth;
    const int64_t id = a.ids[row];
    const bool has = a.first_token <= id && id < a.end_token;
    const int64_t token = (id - a.first_token) * a.width, position = row % a.tokens * a.width;
    for (int64_t first = thread.lane() * kWidth; first < a.width; first += kMany * kStride) {
      Group<T, kWidth> tokens[kMany], positions[kMany];
      EBB_UNROLL
      for (int m = 0; m < kMany; ++m) {
        const int64_t column = first + m * kStride;
        if (column >= a.width || !has) break;
        tokens[m] = Load<T, kWidth>(a.token_table, token + column);
        positions[m] = Load<T, kWidth>(a.position_table, position + column);
      }
      EBB_UNROLL
      for (int m = 0; m < kMany; ++m) {
        const int64_t column = first + m * kStride;
        if (column >= a.width) break;
        float sum[kWidth] = {}, added[kWidth];
        if (has) {
          Unpack(tokens[m], sum);
          Unpack(positions[m], added);
          EBB_UNROLL
          for (int i = 0; i < kWidth; ++i) sum[i] += added[i];
        }
        Store(Pack<T>(sum), a.output, row * a.width + column);
      }
    }
  }
};

// Sorts rows by their ids, and rows of one id in ascending order. A row's place is the number of
// rows that come before it, found by comparing it with all others. So it needs no atomics and no
// counts of the whole vocabulary, and little work for the rows of a micro-batch: 2^28 comparisons
// for 16,384 of them. A warp places kRows neighbouring rows at once. Ids that the table does not
// have come last, as id `vocabulary`.
struct PlaceRowsKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / kernel::kWarp, kRows = 8;
  struct Arrays {
    const int32_t* ids;
    int64_t rows, first_token, vocabulary;
    int32_t *order, *sorted;  // the rows, and their ids, in sorted order
  };
  static int64_t Blocks(int64_t rows) { return Ceil(rows, kWarps * kRows); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t first = (thread.block() * kWarps + thread.warp()) * kRows;
    if (first >= a.rows) return;
    int32_t mine[kRows], places[kRows] = {};
    EBB_UNROLL
    for (int r = 0; r < kRows; ++r)
      mine[r] = first + r < a.rows ? IdOf(a, first + r) : std::numeric_limits<int32_t>::max();
    for (int64_t other = thread.lane(); other < first; other += kernel::kWarp) {
      const int32_t id = IdOf(a, other);
      EBB_UNROLL
      for (int r = 0; r < kRows; ++r) places[r] += id <= mine[r] ? 1 : 0;
    }
    for (int64_t other = first + kRows + thread.lane(); other < a.rows; other += kernel::kWarp) {
      const int32_t id = IdOf(a, other);
      EBB_UNROLL
      for (int r = 0; r < kRows; ++r) places[r] += id < mine[r] ? 1 : 0;
    }
    EBB_UNROLL
    for (int r = 0; r < kRows; ++r) {
      int32_t place = kernel::WarpSum(thread, places[r]);
      EBB_UNROLL
      for (int o = 0; o < kRows; ++o)
        place += (o < r ? mine[o] <= mine[r] : mine[o] < mine[r]) ? 1 : 0;
      if (thread.lane() != 0 || first + r >= a.rows) continue;
      a.order[place] = static_cast<int32_t>(first + r);
      a.sorted[place] = mine[r];
    }
  }

 private:
  static EBB_HOST_DEVICE int32_t IdOf(const Arrays& a, int64_t row) {
    const int64_t id = a.ids[row] - a.first_token;
    return static_cast<int32_t>(0 <= id && id < a.vocabulary ? id : a.vocabulary);
  }
};

// starts[id], of vocabulary + 1 numbers: how many of the sorted ids are less. A warp handles the
// gap between two neighbours among them.
struct StartsKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / kernel::kWarp;
  struct Arrays {
    const int32_t* sorted;
    int64_t rows, vocabulary;
    int32_t* starts;
  };
  static int64_t Blocks(int64_t rows) { return Ceil(rows + 1, kWarps); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t place = thread.block() * kWarps + thread.warp();
    if (place > a.rows) return;
    const int64_t before = place == 0 ? -1 : a.sorted[place - 1];
    const int64_t here = place == a.rows ? a.vocabulary : a.sorted[place];
    for (int64_t id = before + 1 + thread.lane(); id <= here; id += kernel::kWarp)
      a.starts[id] = static_cast<int32_t>(place);
  }
};

struct TableSumsArrays {
  const void* gradient = nullptr;  // [sequences * tokens, width]
  int64_t width = 0, table_rows = 0;
  // Rows order[starts[r]] to order[starts[r + 1]] belong to table row r. If these are null, they
  // are rows r, r + tokens, ... of all sequences, if r is one of the tokens.
  const int32_t *order = nullptr, *starts = nullptr;
  int64_t sequences = 0, tokens = 0;
  Target target = {};
};

// A table's gradient: each of its rows gets the sum of the gradient's rows that belong to it. A
// block has one table row for each warp, and 32 groups of its columns. If many rows belong to one
// table row, each warp sums a stretch of them, and the sums are added in the order of the warps.
template <class T, int kWidth>
struct TableSumsKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / kernel::kWarp;
  static constexpr int kColumns = kernel::kWarp * kWidth;
  static constexpr int kMany = 8;  // rows with loads in flight together
  static constexpr int64_t kOfOneWarp = 4 * kMany;
  static constexpr size_t kSharedBytes = kWarps * kColumns * sizeof(float);

  using Arrays = TableSumsArrays;

  static int64_t Blocks(int64_t table_rows, int64_t width) {
    return Ceil(table_rows, kWarps) * Ceil(width, kColumns);
  }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t tiles = (a.width + kColumns - 1) / kColumns;
    const int64_t column = thread.block() % tiles * kColumns + thread.lane() * kWidth;
    const int64_t first_row = thread.block() / tiles * kWarps;
    {
      const Stretch all = Of(a, first_row + thread.warp());
      if (all.table_row < a.table_rows && all.count() <= kOfOneWarp && column < a.width) {
        float sums[kWidth] = {};
        Add(a, all, column, sums);
        if (all.count() > 0 || a.target.beta == 0)
          StoreTarget(sums, a.target, all.table_row * a.width + column);
      }
    }
    auto* const shared = reinterpret_cast<float*>(thread.shared());  // [warps, columns]
    for (int w = 0; w < kWarps; ++w) {
      const Stretch all = Of(a, first_row + w);
      if (all.table_row >= a.table_rows || all.count() <= kOfOneWarp) continue;  // all threads do
      Stretch mine = all;
      mine.begin = all.begin + all.count() * thread.warp() / kWarps;
      mine.end = all.begin + all.count() * (thread.warp() + 1) / kWarps;
      float sums[kWidth] = {};
      if (column < a.width) Add(a, mine, column, sums);
      float* const places = shared + thread.lane() * kWidth;
      thread.Sync();  // the row before has been added
      EBB_UNROLL
      for (int i = 0; i < kWidth; ++i) places[thread.warp() * kColumns + i] = sums[i];
      thread.Sync();
      if (thread.warp() != w || column >= a.width) continue;
      EBB_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        sums[i] = places[i];
        for (int other = 1; other < kWarps; ++other) sums[i] += places[other * kColumns + i];
      }
      StoreTarget(sums, a.target, all.table_row * a.width + column);
    }
  }

 private:
  struct Stretch {
    int64_t table_row, begin, end;
    EBB_HOST_DEVICE int64_t count() const { return end - begin; }
  };

  static EBB_HOST_DEVICE Stretch Of(const Arrays& a, int64_t table_row) {
    if (table_row >= a.table_rows) return {table_row, 0, 0};
    if (a.order != nullptr) return {table_row, a.starts[table_row], a.starts[table_row + 1]};
    return {table_row, 0, table_row < a.tokens ? a.sequences : 0};
  }

  static EBB_HOST_DEVICE void Add(const Arrays& a, const Stretch& stretch, int64_t column,
                                  float (&sums)[kWidth]) {
    for (int64_t at = stretch.begin; at < stretch.end; at += kMany) {
      Group<T, kWidth> loaded[kMany];
      EBB_UNROLL
      for (int m = 0; m < kMany; ++m) {
        if (at + m >= stretch.end) break;
        const int64_t row =
            a.order != nullptr ? a.order[at + m] : stretch.table_row + (at + m) * a.tokens;
        loaded[m] = Load<T, kWidth>(a.gradient, row * a.width + column);
      }
      EBB_UNROLL
      for (int m = 0; m < kMany; ++m) {
        if (at + m >= stretch.end) break;
        float numbers[kWidth];
        Unpack(loaded[m], numbers);
        EBB_UNROLL
        for (int i = 0; i < kWidth; ++i) sums[i] += numbers[i];
      }
    }
  }
};

namespace {

template <class T>
cudaError_t LaunchTableSums(cudaStream_t stream, const TableSumsArrays& arrays) {
  const auto launch = [&](auto which) {
    using Kernel = decltype(which);
    return kernel::LaunchKernel<Kernel>(stream,
                                        {.blocks = Kernel::Blocks(arrays.table_rows, arrays.width),
                                         .shared_bytes = Kernel::kSharedBytes},
                                        arrays);
  };
  return RowsAreAligned<T>(arrays.width, {arrays.gradient})
             ? launch(TableSumsKernel<T, kGroup<T>>())
             : launch(TableSumsKernel<T, 1>());
}

}  // namespace

cudaError_t LaunchEmbed(cudaStream_t stream, DType dtype, const EmbedArrays& arrays) {
  return WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto which) {
      using Kernel = decltype(which);
      return kernel::LaunchKernel<Kernel>(
          stream, {.blocks = Kernel::Blocks(arrays.sequences * arrays.tokens)}, arrays);
    };
    return RowsAreAligned<T>(arrays.width,
                             {arrays.token_table, arrays.position_table, arrays.output})
               ? launch(EmbedKernel<T, kGroup<T>>())
               : launch(EmbedKernel<T, 1>());
  });
}

int64_t EmbedBackwardInts(int64_t rows, int64_t vocabulary) {
  return 2 * rows + vocabulary + 1;
}

cudaError_t LaunchEmbedBackward(cudaStream_t stream, DType dtype, const EmbedBackwardArrays& x,
                                int32_t* sorted) {
  const int64_t rows = x.sequences * x.tokens;
  int32_t* const order = sorted + rows;
  int32_t* const starts = order + rows;
  cudaError_t result =
      kernel::LaunchKernel<PlaceRowsKernel>(stream, {.blocks = PlaceRowsKernel::Blocks(rows)},
                                            {.ids = x.ids,
                                             .rows = rows,
                                             .first_token = x.first_token,
                                             .vocabulary = x.vocabulary,
                                             .order = order,
                                             .sorted = sorted});
  if (result != cudaSuccess) return result;
  result = kernel::LaunchKernel<StartsKernel>(
      stream, {.blocks = StartsKernel::Blocks(rows)},
      {.sorted = sorted, .rows = rows, .vocabulary = x.vocabulary, .starts = starts});
  if (result != cudaSuccess) return result;
  return WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const cudaError_t of_tokens = LaunchTableSums<T>(stream, {.gradient = x.output_gradient,
                                                              .width = x.width,
                                                              .table_rows = x.vocabulary,
                                                              .order = order,
                                                              .starts = starts,
                                                              .sequences = x.sequences,
                                                              .tokens = x.tokens,
                                                              .target = x.token_gradient});
    if (of_tokens != cudaSuccess) return of_tokens;
    return LaunchTableSums<T>(stream, {.gradient = x.output_gradient,
                                       .width = x.width,
                                       .table_rows = x.context,
                                       .sequences = x.sequences,
                                       .tokens = x.tokens,
                                       .target = x.position_gradient});
  });
}

cudaError_t LoadEmbeddingKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    using T = decltype(type);
    return kernel::LoadKernels<EmbedKernel<T, kGroup<T>>, EmbedKernel<T, 1>, PlaceRowsKernel,
                               StartsKernel, TableSumsKernel<T, kGroup<T>>,
                               TableSumsKernel<T, 1>>();
  });
}

}  // namespace ebb::gpt::cuda
