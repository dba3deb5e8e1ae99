// The layout of the layers' workspace; see layers.h.
#pragma once

#include <algorithm>

#include "model/arena.h"
#include "model/layers.h"

namespace ebb::gpt {

// Memory that one block keeps of one micro-batch's forward: 9 activations of the model's width for
// each token, and a few numbers for each row. Outputs of norms and GELU are not kept, because
// computing them again costs a pass over memory and no product.
struct Layers::Slot {
  void *qkv = nullptr, *attention = nullptr, *middle = nullptr, *up = nullptr;
  float *log_sum_exp = nullptr, *mean1 = nullptr, *deviation1 = nullptr, *mean2 = nullptr,
        *deviation2 = nullptr;

  Slot(Arena& arena, const GptShape& shape, int64_t rows, int64_t element) {
    qkv = arena.Take(rows * 3 * shape.width * element);
    attention = arena.Take(rows * shape.width * element);
    middle = arena.Take(rows * shape.width * element);
    up = arena.Take(rows * 4 * shape.width * element);
    log_sum_exp = arena.Take<float>(rows * shape.heads);
    for (float** numbers : {&mean1, &deviation1, &mean2, &deviation2})
      *numbers = arena.Take<float>(rows);
  }
};

struct Layers::Space {
  int64_t chunk_rows = 0;  // for the head
  std::byte* ops_scratch = nullptr;
  int64_t ops_scratch_bytes = 0;
  // Used in blocks. `hidden`: rows of 4 * width numbers; `row_scratch`: rows of `width`.
  void *hidden = nullptr, *hidden_gradient = nullptr, *row_scratch = nullptr,
       *row_scratch_gradient = nullptr;
  // Used in the head. No block's pass overlaps it, so it has the same memory.
  void *logits = nullptr, *normal = nullptr, *normal_gradient = nullptr, *logit_gradient = nullptr;
  float *mean = nullptr, *deviation = nullptr, *last_logits = nullptr;
  float *losses = nullptr, *loss = nullptr;  // of a micro-batch's rows, and their mean
  std::vector<Slot> slots;
  int64_t bytes = 0;

  static OpsLimits Limits(const GptShape& shape, const Options& options) {
    return {.rows = options.sequences * shape.context,
            .tokens = shape.context,
            .width = shape.width,
            .heads = shape.heads,
            .vocabulary = shape.vocabulary};
  }

  // On the CPU: about 16 MiB of logits, and at least 64 rows, because products with fewer are slow.
  static int64_t ChunkForCaches(int64_t rows, int64_t vocabulary) {
    return std::min(rows, std::max<int64_t>(64, (int64_t{4} << 20) / vocabulary));
  }
  // On a GPU: about `most` rows, so that their logits fit the memory that blocks need anyway. There
  // are as few chunks as that allows, because each adds to the table's gradient once. The chunks
  // are equal: whole tiles of a product, and no chunk has more rows.
  static int64_t ChunkForTiles(int64_t rows, int64_t most) {
    constexpr int64_t kTile = 256;
    most = std::max(most, kTile);
    const int64_t chunks = (rows + most - 1) / most, even = (rows + chunks - 1) / chunks;
    return std::min(rows, (even + kTile - 1) / kTile * kTile);
  }

  Space(const Processor& processor, const GptShape& shape, const Options& options,
        std::byte* base) {
    const int64_t rows = options.sequences * shape.context, element = SizeOf(options.compute);
    Arena arena(base);
    ops_scratch_bytes = ScratchBytes(processor, options.compute, Limits(shape, options));
    ops_scratch = arena.Take<std::byte>(ops_scratch_bytes);
    losses = arena.Take<float>(rows);
    loss = arena.Take<float>(1);
    for (int64_t i = 0; i < options.slots; ++i) slots.emplace_back(arena, shape, rows, element);

    std::byte* shared = base == nullptr ? nullptr : base + arena.used();
    Arena block(shared), head(shared);
    hidden = block.Take(rows * 4 * shape.width * element);
    hidden_gradient = block.Take(rows * 4 * shape.width * element);
    row_scratch = block.Take(rows * shape.width * element);
    row_scratch_gradient = block.Take(rows * shape.width * element);

    const DType logits_dtype = LogitsDtype(processor, options.compute);
    chunk_rows = processor.kind == DeviceKind::kCpu
                     ? ChunkForCaches(rows, shape.vocabulary)
                     : ChunkForTiles(rows, block.used() / (shape.vocabulary * element));
    logits = head.Take(chunk_rows * shape.vocabulary * SizeOf(logits_dtype));
    logit_gradient = options.compute == logits_dtype
                         ? logits
                         : head.Take(chunk_rows * shape.vocabulary * element);
    normal = head.Take(chunk_rows * shape.width * element);
    normal_gradient = head.Take(chunk_rows * shape.width * element);
    for (float** numbers : {&mean, &deviation}) *numbers = head.Take<float>(chunk_rows);
    last_logits = head.Take<float>(shape.vocabulary);
    bytes = arena.used() + std::max(block.used(), head.used());
  }
};

}  // namespace ebb::gpt
