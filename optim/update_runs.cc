#include "ebb/optim/update_runs.h"

#include <cassert>
#include <cstddef>
#include <type_traits>

namespace ebb::optim {

StateArray PieceAt(void* place, const Encoding& encoding, int64_t count) {
  StateArray piece = {.codes = place, .encoding = encoding};
  if (encoding.block > 0) {
    auto* const bytes = static_cast<std::byte*>(place);
    piece.scales = reinterpret_cast<float*>(bytes + count * encoding.code_bytes());
  }
  return piece;
}

StateArray PartOf(const StateArray& array, int64_t begin) {
  StateArray part = array;
  if (array.codes != nullptr)
    part.codes = static_cast<std::byte*>(array.codes) + begin * array.encoding.code_bytes();
  if (array.encoding.block == 0 || array.scales == nullptr) return part;
  assert(begin % array.encoding.block == 0);
  part.scales = array.scales + begin / array.encoding.block;
  return part;
}

UpdateArrays PartOf(const UpdateArrays& arrays, int64_t begin, int64_t count) {
  // Null stays null.
  const auto from = [begin]<class T>(T* array) {
    return array == nullptr ? nullptr : array + begin;
  };
  const auto bytes_from = [begin](auto* array, DType dtype) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(array)>>,
                                    const std::byte, std::byte>;
    return array == nullptr ? nullptr : static_cast<Byte*>(array) + begin * SizeOf(dtype);
  };
  UpdateArrays part = arrays;
  part.master = from(arrays.master);
  part.gradient = bytes_from(arrays.gradient, arrays.gradient_dtype);
  for (int s = 0; s < kStatesMax; ++s) part.states[s] = PartOf(arrays.states[s], begin);
  part.parameter = bytes_from(arrays.parameter, arrays.parameter_dtype);
  part.master_low = from(arrays.master_low);
  part.parameter_in = bytes_from(arrays.parameter_in, arrays.parameter_dtype);
  part.rounding.index += begin;
  part.count = count;
  return part;
}

}  // namespace ebb::optim
