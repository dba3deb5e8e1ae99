// In how many ways a product can be computed: with all that goes with it fused into cuBLASLt's kernel,
// or the product alone and the rest by kernels of ours, each with one of the algorithms that cuBLASLt's
// heuristic names. Which is faster no documentation says: what is fused restricts cuBLASLt to other
// kernels, and the first answer of the heuristic is not always the best.
//
// As a letter: A, B, C, D: fused, with the first, second ... algorithm; a, b, c, d: apart.
#pragma once

#include <optional>

namespace ebb::gpt::cuda {

struct ProductWay {
  static constexpr int kAnswersMax = 4;

  bool fused = false;
  int answer = 0;

  char letter() const { return static_cast<char>((fused ? 'A' : 'a') + answer); }
  static std::optional<ProductWay> Of(char letter) {
    for (const char first : {'A', 'a'}) {
      if (letter >= first && letter < first + kAnswersMax)
        return ProductWay{.fused = first == 'A', .answer = letter - first};
    }
    return std::nullopt;
  }
  friend bool operator==(const ProductWay&, const ProductWay&) = default;
};

}  // namespace ebb::gpt::cuda
