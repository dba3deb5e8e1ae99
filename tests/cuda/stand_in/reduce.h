// NCCL's arithmetic, as far as the stand-in needs it: every product and every partial sum is
// rounded to the number type, in rank order.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace ebb::stand_in {

size_t BytesOf(ncclDataType_t type);
float Load(ncclDataType_t type, const void* value);

enum class Combine { kSum, kMax, kMin };
void Reduce(ncclDataType_t type, Combine combine, float scale,
            const std::vector<const std::byte*>& inputs, size_t count, std::byte* result);

}  // namespace ebb::stand_in
