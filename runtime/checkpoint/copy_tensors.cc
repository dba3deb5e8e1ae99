#include "ebb/runtime/checkpoint/copy_tensors.h"

#include <algorithm>
#include <vector>

#include "ebb/runtime/config/status_macros.h"

namespace ebb {

absl::Status ForEachPiece(TensorSource& source, TensorSink sink) {
  std::vector<float> values;
  for (size_t tensor = 0; tensor < source.tensors().size(); ++tensor) {
    const int64_t elements = source.tensors()[tensor].elements();
    for (int64_t begin = 0; begin < elements; begin += kPieceElements) {
      values.resize(static_cast<size_t>(std::min(kPieceElements, elements - begin)));
      EBB_RETURN_IF_ERROR(source.Read(tensor, begin, values));
      EBB_RETURN_IF_ERROR(sink(tensor, values));
    }
  }
  return absl::OkStatus();
}

}  // namespace ebb
