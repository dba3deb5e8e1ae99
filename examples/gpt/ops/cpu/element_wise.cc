#include "ops/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/element_wise.cc"
#include "hwy/foreach_target.h"
// These come after foreach_target.h, which includes this file again for every target.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "ops/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::gpt::cpu::HWY_NAMESPACE {

// gelu(x) = x / 2 * (1 + tanh(z)) = x * sigmoid(2 z), z = sqrt(2 / pi) * (x + 0.044715 x^3): one
// exponential, one division.
constexpr float kRootTwoOverPi = 0.7978845608028654f;
constexpr float kCubic = 0.044715f;

template <class D>
HWY_INLINE hn::Vec<D> SigmoidOfTwoZ(D d, hn::Vec<D> x) {
  const auto square = hn::Mul(x, x);
  const auto inner = hn::Mul(x, hn::MulAdd(square, hn::Set(d, kCubic), hn::Set(d, 1.0f)));
  // Beyond +-80 the sigmoid is 0 or 1 in fp32; without the bound the exponential would overflow to
  // infinity.
  const auto exponent = hn::Clamp(hn::Mul(inner, hn::Set(d, -2 * kRootTwoOverPi)),
                                  hn::Set(d, -80.0f), hn::Set(d, 80.0f));
  // The clamp and the exponential lose NaN, but a broken number must reach the loss.
  const auto sigmoid = hn::Div(hn::Set(d, 1.0f), hn::Add(hn::Set(d, 1.0f), hn::Exp(d, exponent)));
  return hn::IfThenElse(hn::IsNaN(x), x, sigmoid);
}

template <class T>
void GeluOf(const T* x, T* y, int64_t count) {
  ForEach(count, [&](auto d, int64_t i) HWY_ATTR {
    const auto v = LoadAs(d, x + i);
    StoreAs(d, hn::Mul(v, SigmoidOfTwoZ(d, v)), y + i);
  });
}

// gelu'(x) = s + x s (1 - s) * 2 z'(x), s = sigmoid(2 z), z' = sqrt(2 / pi) * (1 + 3 * 0.044715
// x^2)
template <class T>
void GeluBackwardOf(const T* x, T* y, T* gradient, int64_t count) {
  ForEach(count, [&](auto d, int64_t i) HWY_ATTR {
    const auto v = LoadAs(d, x + i);
    const auto s = SigmoidOfTwoZ(d, v);
    const auto value = hn::Mul(v, s);
    const auto slope = hn::MulAdd(hn::Mul(v, v), hn::Set(d, 6 * kRootTwoOverPi * kCubic),
                                  hn::Set(d, 2 * kRootTwoOverPi));
    const auto derivative = hn::MulAdd(hn::Mul(value, hn::Sub(hn::Set(d, 1.0f), s)), slope, s);
    StoreAs(d, value, y + i);
    StoreAs(d, hn::Mul(derivative, LoadAs(d, gradient + i)), gradient + i);
  });
}

// Columns in strips of a few vectors; their sums stay in registers while the rows stream by.
template <class T, class G>
void ColumnSumsOf(const T* matrix, int64_t rows, int64_t columns, G* sums, float beta,
                  int64_t begin, int64_t end) {
  const Full d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t c = begin;
  for (; c + 4 * lanes <= end; c += 4 * lanes) {
    auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = matrix + r * columns + c;
      s0 = hn::Add(s0, LoadAs(d, row));
      s1 = hn::Add(s1, LoadAs(d, row + lanes));
      s2 = hn::Add(s2, LoadAs(d, row + 2 * lanes));
      s3 = hn::Add(s3, LoadAs(d, row + 3 * lanes));
    }
    StoreTo(d, s0, sums + c, beta);
    StoreTo(d, s1, sums + c + lanes, beta);
    StoreTo(d, s2, sums + c + 2 * lanes, beta);
    StoreTo(d, s3, sums + c + 3 * lanes, beta);
  }
  ForEach(end - c, [&](auto tag, int64_t i) HWY_ATTR {
    auto sum = hn::Zero(tag);
    for (int64_t r = 0; r < rows; ++r)
      sum = hn::Add(sum, LoadAs(tag, matrix + r * columns + c + i));
    StoreTo(tag, sum, sums + c + i, beta);
  });
}

void GeluRange(DType dtype, const void* input, void* output, int64_t begin, int64_t end) {
  WithType(dtype, [&]<class T>(T*) {
    GeluOf(static_cast<const T*>(input) + begin, static_cast<T*>(output) + begin, end - begin);
  });
}
void GeluBackwardRange(DType dtype, const void* input, void* output, void* gradient, int64_t begin,
                       int64_t end) {
  WithType(dtype, [&]<class T>(T*) {
    GeluBackwardOf(static_cast<const T*>(input) + begin, static_cast<T*>(output) + begin,
                   static_cast<T*>(gradient) + begin, end - begin);
  });
}
void AddRange(DType dtype, const void* a, const void* b, void* sum, int64_t begin, int64_t end) {
  WithType(dtype, [&]<class T>(T*) {
    const T *x = static_cast<const T*>(a) + begin, *y = static_cast<const T*>(b) + begin;
    T* z = static_cast<T*>(sum) + begin;
    ForEach(end - begin, [&](auto d, int64_t i) HWY_ATTR {
      StoreAs(d, hn::Add(LoadAs(d, x + i), LoadAs(d, y + i)), z + i);
    });
  });
}
void AddBiasRows(DType dtype, const AddBiasArrays& a, int64_t begin, int64_t end) {
  WithType(dtype, [&]<class T>(T*) {
    const T* bias = static_cast<const T*>(a.bias);
    for (int64_t r = begin; r < end; ++r) {
      const T *x = static_cast<const T*>(a.input) + r * a.width,
              *residual = static_cast<const T*>(a.residual) + r * a.width;
      T* y = static_cast<T*>(a.output) + r * a.width;
      ForEach(a.width, [&](auto d, int64_t i) HWY_ATTR {
        const auto sum = hn::Add(LoadAs(d, x + i), LoadAs(d, bias + i));
        StoreAs(d, hn::Add(sum, LoadAs(d, residual + i)), y + i);
      });
    }
  });
}
void ColumnSumsRange(DType dtype, const void* matrix, int64_t rows, int64_t columns,
                     const Target& sums, int64_t begin, int64_t end) {
  WithType(dtype, [&]<class T>(T*) {
    WithType(sums.dtype, [&]<class G>(G*) {
      ColumnSumsOf(static_cast<const T*>(matrix), rows, columns, static_cast<G*>(sums.data),
                   sums.beta, begin, end);
    });
  });
}

void Widen(DType dtype, Block source, int64_t rows, int64_t columns, float* destination) {
  WithType(dtype, [&]<class T>(T*) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = static_cast<const T*>(source.data) + r * source.stride;
      float* to = destination + r * columns;
      ForEach(columns,
              [&](auto d, int64_t i) HWY_ATTR { hn::StoreU(LoadAs(d, from + i), d, to + i); });
    }
  });
}

template <class G, class B>
void StoreOf(const StoreArrays& a, int64_t rows, int64_t columns) {
  const B* bias = static_cast<const B*>(a.bias);
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = a.source + r * columns;
    G* to = static_cast<G*>(a.target.data) + r * a.target_stride;
    if (bias != nullptr) {
      ForEach(columns, [&](auto d, int64_t i) HWY_ATTR {
        StoreTo(d, hn::Add(hn::LoadU(d, from + i), LoadAs(d, bias + i)), to + i, a.target.beta);
      });
    } else {
      ForEach(columns, [&](auto d, int64_t i)
                           HWY_ATTR { StoreTo(d, hn::LoadU(d, from + i), to + i, a.target.beta); });
    }
  }
}

void Store(const StoreArrays& arrays, int64_t rows, int64_t columns) {
  WithType(arrays.target.dtype, [&]<class G>(G*) {
    WithType(arrays.bias_dtype, [&]<class B>(B*) { StoreOf<G, B>(arrays, rows, columns); });
  });
}

}  // namespace ebb::gpt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::gpt::cpu {
GPT_DISPATCH(GeluRange, (DType dtype, const void* input, void* output, int64_t begin, int64_t end),
             dtype, input, output, begin, end)
GPT_DISPATCH(GeluBackwardRange,
             (DType dtype, const void* input, void* output, void* gradient, int64_t begin,
              int64_t end),
             dtype, input, output, gradient, begin, end)
GPT_DISPATCH(AddRange,
             (DType dtype, const void* a, const void* b, void* sum, int64_t begin, int64_t end),
             dtype, a, b, sum, begin, end)
GPT_DISPATCH(AddBiasRows, (DType dtype, const AddBiasArrays& arrays, int64_t begin, int64_t end),
             dtype, arrays, begin, end)
GPT_DISPATCH(ColumnSumsRange,
             (DType dtype, const void* matrix, int64_t rows, int64_t columns, const Target& sums,
              int64_t begin, int64_t end),
             dtype, matrix, rows, columns, sums, begin, end)
GPT_DISPATCH(Widen, (DType dtype, Block source, int64_t rows, int64_t columns, float* to), dtype,
             source, rows, columns, to)
GPT_DISPATCH(Store, (const StoreArrays& arrays, int64_t rows, int64_t columns), arrays, rows,
             columns)
}  // namespace ebb::gpt::cpu
#endif
