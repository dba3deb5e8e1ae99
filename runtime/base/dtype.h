// The number types of parameters, gradients and collectives, and their conversions.
//
//   fp32 -> bf16, fp16 for gradients and activations: nearest, ties to even.
//   fp32 -> bf16 for parameters: half away from zero (add 0x8000, cut), so that the bf16 value and
//   the cut 16 bits rebuild the fp32 master exactly. See optim/cast.h for the vectorised forms of
//   both.
//
// The conversions are constexpr, so that code for a device may use them as they are.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace ebb {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16, kInt8 };

constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kInt8:
      return 1;
  }
  return 0;
}

// "fp32", "bf16", "fp16", "int8": the spelling of the JSON and of every message.
constexpr std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "fp16";
    case DType::kInt8:
      return "int8";
  }
  return "";
}

// Storage of 16-bit numbers. They have conversions, but no arithmetic.
struct BFloat16 {
  uint16_t bits = 0;
  BFloat16() = default;
  constexpr explicit BFloat16(float value);  // nearest, ties to even
  constexpr explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
  friend bool operator==(BFloat16, BFloat16) = default;
};
struct Float16 {
  uint16_t bits = 0;
  Float16() = default;
  constexpr explicit Float16(float value);  // nearest, ties to even; beyond 65,504: infinity
  constexpr explicit operator float() const;
  friend bool operator==(Float16, Float16) = default;
};

template <class T>
inline constexpr bool kIsNumber = false;
template <>
inline constexpr bool kIsNumber<float> = true;
template <>
inline constexpr bool kIsNumber<BFloat16> = true;
template <>
inline constexpr bool kIsNumber<Float16> = true;
template <>
inline constexpr bool kIsNumber<int8_t> = true;

template <class T>
inline constexpr DType kDTypeOf = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;
template <>
inline constexpr DType kDTypeOf<Float16> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<int8_t> = DType::kInt8;

constexpr BFloat16::BFloat16(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  if ((u & 0x7fffffffu) > 0x7f800000u) {
    bits = static_cast<uint16_t>((u >> 16) | 0x40u);  // a NaN stays one, quiet
  } else {
    bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
}

// The cast of parameters. NaN stays NaN. For all other values 0x8000 is added and the lower bits
// are cut, also across binades and into infinity.
constexpr BFloat16 RoundHalfAway(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  BFloat16 result;
  result.bits = (u & 0x7fffffffu) > 0x7f800000u ? static_cast<uint16_t>((u >> 16) | 0x40u)
                                                : static_cast<uint16_t>((u + 0x8000u) >> 16);
  return result;
}

constexpr Float16::Float16(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    bits = static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  } else if (magnitude >= 0x477ff000u) {  // 65,520 and above round to infinity
    bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (magnitude < 0x38800000u) {
    // Subnormal in fp16: adding 0.5 makes the fp32 adder do the rounding at 2^-24.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    bits = static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  } else {
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    bits = static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
}

constexpr Float16::operator float() const {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

}  // namespace ebb
