#include "reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ebb/runtime/base/dtype.h"

namespace ebb::stand_in {
namespace {

template <class T>
T Read(const void* value) {
  T read;
  std::memcpy(&read, value, sizeof(read));
  return read;
}

template <class T>
void ReduceAs(Combine combine, float scale, const std::vector<const std::byte*>& inputs,
              size_t count, std::byte* result) {
  for (size_t i = 0; i < count; ++i) {
    float total = 0;
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      const float read = static_cast<float>(Read<T>(inputs[rank] + i * sizeof(T)));
      const float value = static_cast<float>(static_cast<T>(read * scale));
      if (rank == 0) {
        total = value;
      } else if (combine == Combine::kSum) {
        total = static_cast<float>(static_cast<T>(total + value));
      } else {
        total = combine == Combine::kMax ? std::max(total, value) : std::min(total, value);
      }
    }
    const T rounded = static_cast<T>(total);
    std::memcpy(result + i * sizeof(T), &rounded, sizeof(T));
  }
}

}  // namespace

size_t BytesOf(ncclDataType_t type) {
  return type == ncclInt8 ? 1 : type == ncclFloat32 ? 4 : 2;
}

float Load(ncclDataType_t type, const void* value) {
  return type == ncclFloat32    ? Read<float>(value)
         : type == ncclBfloat16 ? static_cast<float>(Read<BFloat16>(value))
                                : static_cast<float>(Read<Float16>(value));
}

void Reduce(ncclDataType_t type, Combine combine, float scale,
            const std::vector<const std::byte*>& inputs, size_t count, std::byte* result) {
  switch (type) {
    case ncclFloat32:
      return ReduceAs<float>(combine, scale, inputs, count, result);
    case ncclBfloat16:
      return ReduceAs<BFloat16>(combine, scale, inputs, count, result);
    case ncclFloat16:
      return ReduceAs<Float16>(combine, scale, inputs, count, result);
    default:
      return ReduceAs<int8_t>(combine, scale, inputs, count, result);
  }
}

}  // namespace ebb::stand_in
