// The ways to compute a product. Either the rest of the work is fused into cuBLASLt's kernel, or
// our kernels do it after the product. Each way has one of the algorithms that cuBLASLt's heuristic
// names. Only a measurement shows which is faster, because fusing restricts cuBLASLt to other
// kernels, and the heuristic's first answer is not always the best.
//
// Each way has a letter. A, B, C and D are fused ways with the first, second, third and fourth
// algorithm; a, b, c and d are the others.
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
