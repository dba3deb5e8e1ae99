#include "model/space.h"

#include <algorithm>

namespace ebb::gpt {
namespace {

// On the CPU: about 16 MiB of logits, and at least 64 rows, because products with fewer are slow.
int64_t ChunkForCaches(int64_t rows, int64_t vocabulary) {
  return std::min(rows, std::max<int64_t>(64, (int64_t{4} << 20) / vocabulary));
}
// On a GPU: about `most` rows, so that their logits fit the memory that blocks need anyway. There
// are as few chunks as that allows, because each adds to the table's gradient once. The chunks
// are equal: whole tiles of a product, and no chunk has more rows.
int64_t ChunkForTiles(int64_t rows, int64_t most) {
  constexpr int64_t kTile = 256;
  most = std::max(most, kTile);
  const int64_t chunks = (rows + most - 1) / most, even = (rows + chunks - 1) / chunks;
  return std::min(rows, (even + kTile - 1) / kTile * kTile);
}

}  // namespace

Layers::Slot::Slot(Arena& arena, const TensorShare& share, int64_t rows, int64_t own_rows,
                   int64_t width, int64_t element) {
  qkv = arena.Take(rows * 3 * share.width * element);
  attention = arena.Take(rows * share.width * element);
  middle = arena.Take(own_rows * width * element);
  up = arena.Take(rows * share.hidden * element);
  log_sum_exp = arena.Take<float>(rows * share.heads);
  for (Statistics* of : {&norm1, &norm2})
    *of = {arena.Take<float>(own_rows), arena.Take<float>(own_rows)};
}

OpsLimits Layers::Space::Limits(const GptShape& shape, const Options& options) {
  const TensorShare share = ShareOf(shape, 0, options.tensor.ranks);
  return {.rows = options.sequences * shape.context,
          .tokens = shape.context,
          .width = shape.width,
          .heads = share.heads,
          .vocabulary = share.vocabulary,
          .attention_width = share.width,
          .is_cut = options.tensor.cuts()};
}

Layers::Space::Space(const Processor& processor, const GptShape& shape, const Options& options,
                     std::byte* base) {
  const int64_t rows = options.sequences * shape.context, element = SizeOf(options.compute);
  const int64_t parts = options.tensor.row_parts(), own = rows / parts;
  // The largest, so that all tensor ranks have one layout.
  const TensorShare share = ShareOf(shape, 0, options.tensor.ranks);
  Arena arena(base);
  ops_scratch_bytes = ScratchBytes(processor, options.compute, Limits(shape, options));
  ops_scratch = arena.Take<std::byte>(ops_scratch_bytes);
  losses = arena.Take<float>(rows);
  loss = arena.Take<float>(1);
  for (int64_t i = 0; i < options.slots; ++i)
    slots.emplace_back(arena, share, rows, own, shape.width, element);

  std::byte* shared = base == nullptr ? nullptr : base + arena.used();
  Arena block(shared), head(shared);
  // Attention's gradient is there, too. With few heads it may be wider.
  hidden = block.Take(rows * std::max(share.hidden, 3 * share.width) * element);
  hidden_gradient = block.Take(rows * share.hidden * element);
  row_scratch = block.Take(rows * shape.width * element);
  row_scratch_gradient = block.Take(rows * shape.width * element);
  if (parts > 1) own_rows = block.Take(own * shape.width * element);

  const DType logits_dtype = LogitsDtype(processor, options.compute);
  chunk_rows = processor.kind == DeviceKind::kCpu
                   ? ChunkForCaches(rows, share.vocabulary)
                   : ChunkForTiles(rows, block.used() / (share.vocabulary * element));
  chunk_rows = (chunk_rows + parts - 1) / parts * parts;
  logits = head.Take(chunk_rows * share.vocabulary * SizeOf(logits_dtype));
  logit_gradient =
      options.compute == logits_dtype ? logits : head.Take(chunk_rows * share.vocabulary * element);
  normal = head.Take(chunk_rows * shape.width * element);
  normal_gradient = head.Take(chunk_rows * shape.width * element);
  norm = {head.Take<float>(chunk_rows), head.Take<float>(chunk_rows)};
  last_logits = head.Take<float>(options.tensor.ranks * share.vocabulary);
  if (options.tensor.cuts()) {
    float* const sums = head.Take<float>(2 * chunk_rows);
    terms = {
        .top = head.Take<float>(chunk_rows), .own_top = head.Take<float>(chunk_rows), .sum = sums};
    part_of_logits = head.Take<float>(share.vocabulary);
  }
  if (parts > 1) {
    own_normal = head.Take(chunk_rows / parts * shape.width * element);
    last_rows = head.Take(parts * shape.width * element);
  }
  bytes = arena.used() + std::max(block.used(), head.used());
}

}  // namespace ebb::gpt
