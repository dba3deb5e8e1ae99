#include <algorithm>
#include <cassert>
#include <cmath>
#include <mutex>
#include <numeric>
#include <vector>

#include "ebb/runtime/device/thread_team.h"
#include "ops/backends.h"
#include "ops/cpu/attention.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/matmul.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

constexpr int64_t kElementGrain = 1024, kColumnGrain = 64, kRowGrain = 4;

// Operations use the scratch one at a time, so it has the size of the largest need. In fp32
// elements: that of one thread's heads, at a multiple of 64 bytes,
int64_t HeadStride(int64_t tokens, int64_t depth) {
  return (cpu::Attention::ScratchFloats(tokens, depth) + 15) / 16 * 16;
}

// and the scratch of a scatter, which sorts the rows of a micro-batch by their row of the table:
// starts and positions.
int64_t ScatterInts(int64_t table_rows, int64_t rows) {
  return table_rows + 1 + rows;
}

// Makes the products of the calls that it gets, for other ops that will get the same calls.
class Preparation final : public Ops {
 public:
  Preparation(cpu::Matmul& matmul, cpu::Attention& attention)
      : matmul_(matmul), attention_(attention) {}

  absl::Status status() const override { return status_; }
  void Matmul(const MatmulArrays& x) override { status_.Update(matmul_.Prepare(x)); }
  void Attention(const AttentionArrays& x) override { status_.Update(attention_.Prepare(x)); }
  void AttentionBackward(const AttentionBackwardArrays& x) override {
    status_.Update(attention_.Prepare(x));
  }
  void AddBias(const AddBiasArrays&) override {}
  void ColumnSums(const void*, int64_t, int64_t, const Target&) override {}
  void Norm(const NormArrays&) override {}
  void NormBackward(const NormBackwardArrays&) override {}
  void LogitTerms(const CrossEntropyArrays&) override {}
  void LogitSums(const CrossEntropyArrays&) override {}
  void CrossEntropy(const CrossEntropyArrays&) override {}
  void Mean(const float*, int64_t, float*) override {}
  void Embed(const EmbedArrays&) override {}
  void EmbedBackward(const EmbedBackwardArrays&) override {}

 private:
  cpu::Matmul& matmul_;
  cpu::Attention& attention_;
  absl::Status status_;
};

class CpuOps final : public Ops {
 public:
  CpuOps(DType compute, int threads, std::span<std::byte> scratch)
      : compute_(compute),
        team_(threads),
        scratch_(reinterpret_cast<float*>(scratch.data()), scratch.size() / sizeof(float)),
        matmul_(compute, gemm_, team_,
                scratch_.first(static_cast<size_t>(cpu::Matmul::ScratchFloats(compute)))),
        attention_(compute, gemm_) {}

  absl::Status status() const override { return gemm_.status(); }
  int64_t unprepared() const override { return gemm_.unprepared(); }
  absl::Status Prepare(absl::FunctionRef<void(Ops&)> calls) override {
    Preparation preparation(matmul_, attention_);
    calls(preparation);
    GPT_RETURN_IF_ERROR(preparation.status());
    std::mutex mutex;
    absl::Status threads;
    team_.Run(team_.threads(), 1, [&](int64_t, int64_t) {
      absl::Status own = gemm_.PrepareThread();
      const std::lock_guard lock(mutex);
      threads.Update(own);
    });
    return threads;
  }

  void Matmul(const MatmulArrays& x) override {
    const int64_t count = x.m * x.n;
    MatmulArrays product = x;
    if (x.before_gelu != nullptr) product.c.data = x.before_gelu;
    matmul_.Run(product);
    if (x.added != nullptr) Add(x.c.data, x.added, x.c.data, count);
    if (x.before_gelu != nullptr) Gelu(x.before_gelu, x.c.data, count);
    if (x.gelu_input != nullptr) GeluBackward(x.gelu_input, x.gelu_output, x.c.data, count);
    if (x.a_sums.data != nullptr) ColumnSums(x.a, x.k, x.m, x.a_sums);
  }

  void AddBias(const AddBiasArrays& arrays) override {
    team_.Run(arrays.rows, kRowGrain,
              [&](int64_t begin, int64_t end) { cpu::AddBiasRows(compute_, arrays, begin, end); });
  }
  void ColumnSums(const void* matrix, int64_t rows, int64_t columns, const Target& sums) override {
    team_.Run(columns, kColumnGrain, [&](int64_t begin, int64_t end) {
      cpu::ColumnSumsRange(compute_, matrix, rows, columns, sums, begin, end);
    });
  }
  void Norm(const NormArrays& arrays) override {
    team_.Run(arrays.rows, kRowGrain,
              [&](int64_t begin, int64_t end) { cpu::NormRows(compute_, arrays, begin, end); });
  }
  void NormBackward(const NormBackwardArrays& arrays) override {
    // Columns come first: the input's gradient may overwrite the residual's, but not the output's,
    // which both passes read.
    team_.Run(arrays.width, kColumnGrain, [&](int64_t begin, int64_t end) {
      cpu::NormBackwardColumns(compute_, arrays, begin, end);
    });
    team_.Run(arrays.rows, kRowGrain, [&](int64_t begin, int64_t end) {
      cpu::NormBackwardRows(compute_, arrays, begin, end);
    });
  }
  void Attention(const AttentionArrays& arrays) override {
    ForEachHead(arrays, [&](int64_t sequence, int64_t head, float* scratch) {
      attention_.ForwardHead(arrays, sequence, head, scratch);
    });
  }
  void AttentionBackward(const AttentionBackwardArrays& arrays) override {
    ForEachHead(arrays, [&](int64_t sequence, int64_t head, float* scratch) {
      attention_.BackwardHead(arrays, sequence, head, scratch);
    });
  }
  void LogitTerms(const CrossEntropyArrays& arrays) override {
    team_.Run(arrays.rows, kRowGrain,
              [&](int64_t begin, int64_t end) { cpu::LogitTermsRows(arrays, begin, end); });
  }
  void LogitSums(const CrossEntropyArrays& arrays) override {
    const RowTerms& terms = arrays.terms;
    for (int64_t r = 0; r < arrays.rows; ++r)
      terms.sum[r] *= std::exp(terms.own_top[r] - terms.top[r]);
  }
  void CrossEntropy(const CrossEntropyArrays& arrays) override {
    team_.Run(arrays.rows, kRowGrain, [&](int64_t begin, int64_t end) {
      cpu::CrossEntropyRows(compute_, arrays, begin, end);
    });
  }
  void Mean(const float* numbers, int64_t count, float* mean) override {
    *mean = static_cast<float>(std::accumulate(numbers, numbers + count, 0.0) /
                               static_cast<double>(count));
  }
  void Embed(const EmbedArrays& arrays) override {
    team_.Run(arrays.sequences * arrays.tokens, kRowGrain,
              [&](int64_t begin, int64_t end) { cpu::EmbedRows(compute_, arrays, begin, end); });
  }
  void EmbedBackward(const EmbedBackwardArrays& x) override {
    const int64_t rows = x.sequences * x.tokens;
    Scatter(x.output_gradient, rows, x.width, x.vocabulary, x.token_gradient,
            [&](int64_t row) { return x.ids[row] - x.first_token; });
    Scatter(x.output_gradient, rows, x.width, x.context, x.position_gradient,
            [&](int64_t row) { return row % x.tokens; });
  }

 private:
  void Gelu(const void* input, void* output, int64_t count) {
    team_.Run(count, kElementGrain, [&](int64_t begin, int64_t end) {
      cpu::GeluRange(compute_, input, output, begin, end);
    });
  }
  // Computes the output again, and turns the gradient into the input's.
  void GeluBackward(const void* input, void* output, void* gradient, int64_t count) {
    team_.Run(count, kElementGrain, [&](int64_t begin, int64_t end) {
      cpu::GeluBackwardRange(compute_, input, output, gradient, begin, end);
    });
  }
  void Add(const void* a, const void* b, void* sum, int64_t count) {
    team_.Run(count, kElementGrain,
              [&](int64_t begin, int64_t end) { cpu::AddRange(compute_, a, b, sum, begin, end); });
  }

  // Heads are spread over as many slots as there are threads, each with its own scratch.
  template <class Arrays, class Body>
  void ForEachHead(const Arrays& arrays, const Body& body) {
    const int64_t slots = team_.threads(), heads = arrays.heads, count = arrays.sequences * heads;
    const int64_t stride = HeadStride(arrays.tokens, arrays.width / heads);
    assert(slots * stride <= static_cast<int64_t>(scratch_.size()));
    team_.Run(slots, 1, [&](int64_t begin, int64_t end) {
      for (int64_t slot = begin; slot < end; ++slot) {
        for (int64_t i = count * slot / slots; i < count * (slot + 1) / slots; ++i) {
          body(i / heads, i % heads, scratch_.data() + slot * stride);
        }
      }
    });
  }

  // Row r of the target gets the sum of the gradient's rows that have table row r, in ascending
  // order. Rows of the gradient whose table row another rank has are left out. No two threads add to one row, so the sum's order is fixed.
  template <class TableRow>
  void Scatter(const void* gradient, int64_t rows, int64_t width, int64_t table_rows,
               const Target& target, const TableRow& table_row) {
    int32_t* starts = reinterpret_cast<int32_t*>(scratch_.data());
    int32_t* positions = starts + table_rows + 1;
    assert(ScatterInts(table_rows, rows) <= static_cast<int64_t>(scratch_.size()));
    std::fill_n(starts, table_rows + 1, 0);
    const auto has = [&](int64_t row) {
      return 0 <= table_row(row) && table_row(row) < table_rows;
    };
    for (int64_t row = 0; row < rows; ++row)
      if (has(row)) ++starts[table_row(row)];
    for (int64_t t = 1; t <= table_rows; ++t) starts[t] += starts[t - 1];  // now they are the ends
    for (int64_t row = rows; row-- > 0;)
      if (has(row)) positions[--starts[table_row(row)]] = static_cast<int32_t>(row);
    team_.Run(table_rows, kRowGrain, [&](int64_t begin, int64_t end) {
      cpu::ScatterRows(compute_,
                       {.output_gradient = gradient,
                        .starts = starts,
                        .positions = positions,
                        .target = target,
                        .width = width},
                       begin, end);
    });
  }

  const DType compute_;
  ThreadTeam team_;
  cpu::Gemm gemm_;
  const std::span<float> scratch_;
  cpu::Matmul matmul_;
  cpu::Attention attention_;
};

}  // namespace

int64_t CpuScratchBytes(DType compute, int threads, const OpsLimits& limits) {
  const int64_t width = limits.attention_width > 0 ? limits.attention_width : limits.width;
  const int64_t depth = limits.heads > 0 ? width / limits.heads : 0;
  const int64_t heads = threads * HeadStride(limits.tokens, depth);
  const int64_t scatter = ScatterInts(std::max(limits.vocabulary, limits.tokens), limits.rows);
  return std::max({cpu::Matmul::ScratchFloats(compute), heads, scatter}) *
         static_cast<int64_t>(sizeof(float));
}

std::unique_ptr<Ops> NewCpuOps(DType compute, int threads, std::span<std::byte> scratch) {
  return std::make_unique<CpuOps>(compute, threads, scratch);
}

}  // namespace ebb::gpt
