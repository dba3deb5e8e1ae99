// Philox 4x32-10: 128 random bits as a pure function of a 128-bit counter and a 64-bit key. So any
// value of a stream can be had without the values before it. Salmon, Moraes, Dror, Shaw: "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011, section 4.
#pragma once

#include <array>
#include <cstdint>

namespace ebb {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

// Each round multiplies two words by constants that the authors searched for, and mixes the halves
// of the products. The key advances by the fractions of the golden ratio and of sqrt(3).
constexpr std::array<uint32_t, 4> Philox4x32(PhiloxCounter counter, PhiloxKey key) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0];
    const uint64_t second = uint64_t{0xCD9E8D57} * counter[2];
    counter = {
        static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(second),
        static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(first)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

}  // namespace ebb
