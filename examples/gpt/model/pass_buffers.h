// Memory for one trial pass over the layers of a micro-batch, outside of an engine's memory. The
// results of such a pass are not used, so all inputs may have one address. The memory is zero at
// first, and so all tokens are 0.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ebb/runtime/config/dtype.h"
#include "model/arena.h"
#include "model/layers.h"
#include "model/model.h"

namespace ebb::gpt {

struct PassBuffers {
  void* parameters = nullptr;  // as large as the largest; all gradients are there, too
  void *input = nullptr, *output = nullptr, *output_gradient = nullptr, *input_gradient = nullptr;
  int32_t *tokens = nullptr, *targets = nullptr;
  int64_t bytes = 0;

  // `gradient`: the dtype of gradients. Over null it only counts.
  PassBuffers(const GptShape& shape, const Layers::Options& options, DType gradient,
              std::byte* base) {
    const int64_t rows = options.sequences * shape.context;
    const int64_t largest =
        shape.width * std::max({4 * shape.width, shape.vocabulary, shape.context});
    const int64_t boundary = rows * shape.width * SizeOf(options.compute);
    Arena arena(base);
    parameters = arena.Take(largest * std::max(SizeOf(options.compute), SizeOf(gradient)));
    for (void** each : {&input, &output, &output_gradient, &input_gradient})
      *each = arena.Take(boundary);
    for (int32_t** each : {&tokens, &targets}) *each = arena.Take<int32_t>(rows);
    bytes = arena.used();
  }
};

}  // namespace ebb::gpt
