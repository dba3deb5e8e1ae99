// The GPT's arithmetic again, in fp64 and as plainly as possible, for comparison with the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace ebb::gpt::reference {

using Values = std::vector<double>;

// c[m, n] = a[m, k] b[k, n], each operand stored transposed or not.
inline Values Matmul(const Values& a, bool a_transposed, const Values& b, bool b_transposed,
                     int64_t m, int64_t n, int64_t k) {
  Values c(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += a[static_cast<size_t>(a_transposed ? l * m + i : i * k + l)] *
               b[static_cast<size_t>(b_transposed ? j * k + l : l * n + j)];
      }
      c[static_cast<size_t>(i * n + j)] = sum;
    }
  }
  return c;
}

// input [rows, inputs], weight [outputs, inputs]
inline Values Linear(const Values& input, const Values& weight, const Values& bias, int64_t rows) {
  const int64_t outputs = static_cast<int64_t>(bias.size()),
                inputs = static_cast<int64_t>(weight.size()) / outputs;
  Values output = Matmul(input, false, weight, true, rows, outputs, inputs);
  for (size_t i = 0; i < output.size(); ++i) output[i] += bias[i % bias.size()];
  return output;
}

inline Values Norm(const Values& input, const Values& weight, const Values& bias) {
  const size_t width = weight.size();
  Values output(input.size());
  for (size_t row = 0; row < input.size(); row += width) {
    double mean = 0, variance = 0;
    for (size_t i = 0; i < width; ++i) mean += input[row + i] / static_cast<double>(width);
    for (size_t i = 0; i < width; ++i)
      variance += std::pow(input[row + i] - mean, 2) / static_cast<double>(width);
    for (size_t i = 0; i < width; ++i) {
      output[row + i] = (input[row + i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i];
    }
  }
  return output;
}

// Adds the gradient of a row's input to `gradient`, and the gradients of weight and bias likewise.
inline void NormBackward(const Values& input, const Values& weight, const Values& output_gradient,
                         Values& gradient, Values& weight_gradient, Values& bias_gradient) {
  const size_t width = weight.size();
  const double count = static_cast<double>(width);
  for (size_t row = 0; row < input.size(); row += width) {
    double mean = 0, variance = 0, mean_g = 0, mean_gn = 0;
    for (size_t i = 0; i < width; ++i) mean += input[row + i] / count;
    for (size_t i = 0; i < width; ++i) variance += std::pow(input[row + i] - mean, 2) / count;
    const double scale = 1 / std::sqrt(variance + 1e-5);
    const auto normal = [&](size_t i) { return (input[row + i] - mean) * scale; };
    for (size_t i = 0; i < width; ++i) {
      const double dy = output_gradient[row + i];
      mean_g += weight[i] * dy / count;
      mean_gn += weight[i] * dy * normal(i) / count;
      weight_gradient[i] += dy * normal(i);
      bias_gradient[i] += dy;
    }
    for (size_t i = 0; i < width; ++i) {
      gradient[row + i] +=
          scale * (weight[i] * output_gradient[row + i] - mean_g - normal(i) * mean_gn);
    }
  }
}

inline double Gelu(double x) {
  return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// Causal, over one sequence: qkv [tokens, 3 * width].
inline Values Attention(const Values& qkv, int64_t tokens, int64_t heads) {
  const int64_t width = static_cast<int64_t>(qkv.size()) / tokens / 3, depth = width / heads;
  Values output(static_cast<size_t>(tokens * width));
  const auto at = [&](int64_t t, int64_t third, int64_t h, int64_t d) {
    return qkv[static_cast<size_t>((t * 3 + third) * width + h * depth + d)];
  };
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      Values p(static_cast<size_t>(t + 1));
      double sum = 0;
      for (int64_t s = 0; s <= t; ++s) {
        double score = 0;
        for (int64_t d = 0; d < depth; ++d) score += at(t, 0, h, d) * at(s, 1, h, d);
        p[static_cast<size_t>(s)] = score / std::sqrt(static_cast<double>(depth));
      }
      const double largest = *std::max_element(p.begin(), p.end());
      for (double& score : p) sum += score = std::exp(score - largest);
      for (int64_t s = 0; s <= t; ++s) {
        for (int64_t d = 0; d < depth; ++d) {
          output[static_cast<size_t>(t * width + h * depth + d)] +=
              p[static_cast<size_t>(s)] / sum * at(s, 2, h, d);
        }
      }
    }
  }
  return output;
}

// Backward's result, and log(sum(exp(scores))) of each row: log_sum_exp [heads, tokens].
struct AttentionPass {
  Values log_sum_exp, qkv_gradient;
};
inline AttentionPass AttentionBackward(const Values& qkv, const Values& output_gradient,
                                       int64_t tokens, int64_t heads) {
  const int64_t width = static_cast<int64_t>(qkv.size()) / tokens / 3, depth = width / heads;
  const double scale = 1 / std::sqrt(static_cast<double>(depth));
  AttentionPass pass = {Values(static_cast<size_t>(heads * tokens)), Values(qkv.size())};
  for (int64_t h = 0; h < heads; ++h) {
    const auto row = [&](int64_t t, int64_t third) { return (t * 3 + third) * width + h * depth; };
    const auto dot = [&](const Values& a, int64_t at, const Values& b, int64_t bt) {
      double sum = 0;
      for (int64_t d = 0; d < depth; ++d)
        sum += a[static_cast<size_t>(at + d)] * b[static_cast<size_t>(bt + d)];
      return sum;
    };
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t dy = t * width + h * depth;
      Values p(static_cast<size_t>(t + 1)), dp(p.size());
      double largest = -INFINITY, sum = 0, mean = 0;
      for (int64_t s = 0; s <= t; ++s) {
        p[static_cast<size_t>(s)] = scale * dot(qkv, row(t, 0), qkv, row(s, 1));
        dp[static_cast<size_t>(s)] = dot(output_gradient, dy, qkv, row(s, 2));
        largest = std::max(largest, p[static_cast<size_t>(s)]);
      }
      for (double& score : p) sum += score = std::exp(score - largest);
      for (size_t s = 0; s < p.size(); ++s) p[s] /= sum, mean += p[s] * dp[s];
      pass.log_sum_exp[static_cast<size_t>(h * tokens + t)] = largest + std::log(sum);
      for (int64_t s = 0; s <= t; ++s) {
        const double weight = p[static_cast<size_t>(s)];
        const double ds = scale * weight * (dp[static_cast<size_t>(s)] - mean);
        for (int64_t d = 0; d < depth; ++d) {
          const auto at = [d](int64_t first) { return static_cast<size_t>(first + d); };
          pass.qkv_gradient[at(row(t, 0))] += ds * qkv[at(row(s, 1))];
          pass.qkv_gradient[at(row(s, 1))] += ds * qkv[at(row(t, 0))];
          pass.qkv_gradient[at(row(s, 2))] += weight * output_gradient[at(dy)];
        }
      }
    }
  }
  return pass;
}

// The mean over rows.
inline double CrossEntropy(const Values& logits, const std::vector<int32_t>& targets) {
  const size_t rows = targets.size(), vocabulary = logits.size() / rows;
  double loss = 0;
  for (size_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (size_t v = 0; v < vocabulary; ++v) sum += std::exp(logits[r * vocabulary + v]);
    loss += std::log(sum) - logits[r * vocabulary + static_cast<size_t>(targets[r])];
  }
  return loss / static_cast<double>(rows);
}

}  // namespace ebb::gpt::reference
