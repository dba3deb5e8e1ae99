// Copies all tensors of a source, one after the other, in pieces. Memory does not depend on the
// model.
#pragma once

#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

// The size of a piece: 64 MiB of values, so that a matrix that is transposed is read a few times at
// most.
inline constexpr int64_t kPieceElements = int64_t{16} << 20;

using TensorSink = absl::FunctionRef<absl::Status(size_t tensor, std::span<const float> values)>;
absl::Status ForEachPiece(TensorSource& source, TensorSink sink);

}  // namespace ebb
