// How an array keeps its numbers: what a code means, and the scales that blocks of codes share.
//
// An array in blocks is a sequence of pieces, and a piece has its codes and then its scales. So one
// transfer or message moves both. Pieces are multiples of a block, so that the codes do not depend
// on how many pieces there are.
//
//   | 512 codes, a byte each | scale of the first 256 | scale of the others |     fp32 scales
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "ebb/runtime/base/dtype.h"

namespace ebb {

struct Encoding {
  enum class Map : uint8_t {
    kNumber,            // a number of the dtype
    kLowHalf,           // the 16 bits below a bf16 parameter; both together are the fp32 master
    kDynamic8,          // an index of the signed dynamic map, which has 256 numbers from -1 to 1
    kDynamicUnsigned8,  // likewise from 0 to 1, for numbers that are never negative
  };

  constexpr Encoding() = default;
  // Numbers as they are.
  constexpr Encoding(DType of) : dtype(of) {}              // NOLINT: a dtype is an encoding
  constexpr Encoding(DType of, Map meaning, int elements)  // NOLINT
      : dtype(of), map(meaning), block(static_cast<uint16_t>(elements)) {}

  DType dtype = DType::kInt8;  // of a code
  Map map = Map::kNumber;
  uint16_t block = 0;  // elements that share a scale; 0: there are no scales

  // The distance of two codes in a piece.
  constexpr int64_t code_bytes() const { return SizeOf(dtype); }
  // A piece of so many elements has so many bytes.
  constexpr int64_t bytes(int64_t elements) const {
    return elements * code_bytes() +
           (block == 0 ? 0 : (elements + block - 1) / block * kScaleBytes);
  }
  // The codes alone; their scales are elsewhere.
  constexpr Encoding codes() const { return {dtype, map, 0}; }
  constexpr bool is_number() const { return map == Map::kNumber; }

  static constexpr int64_t kScaleBytes = 4;
  friend bool operator==(const Encoding&, const Encoding&) = default;
  template <class H>
  friend H AbslHashValue(H hash, const Encoding& encoding) {
    return H::combine(std::move(hash), encoding.dtype, encoding.map, encoding.block);
  }
};

// "dynamic8", "unsigned_dynamic8", or the dtype of numbers: the spelling of files and tables.
constexpr std::string_view Name(const Encoding& encoding) {
  switch (encoding.map) {
    case Encoding::Map::kNumber:
      break;
    case Encoding::Map::kLowHalf:
      return "low_half";
    case Encoding::Map::kDynamic8:
      return "dynamic8";
    case Encoding::Map::kDynamicUnsigned8:
      return "unsigned_dynamic8";
  }
  return Name(encoding.dtype);
}

// One scale for so many elements, as in Dettmers et al. 2022.
inline constexpr int kScaleBlock = 256;
inline constexpr Encoding kLowHalves(DType::kBFloat16, Encoding::Map::kLowHalf, 0);
inline constexpr Encoding kDynamic8(DType::kInt8, Encoding::Map::kDynamic8, kScaleBlock);
inline constexpr Encoding kDynamicUnsigned8(DType::kInt8, Encoding::Map::kDynamicUnsigned8,
                                            kScaleBlock);

}  // namespace ebb
