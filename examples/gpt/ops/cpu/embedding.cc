#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/embedding.cc"

#include <algorithm>

#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::gpt::cpu::HWY_NAMESPACE {

void EmbedRows(DType dtype, const EmbedArrays& a, int64_t begin, int64_t end) {
  WithType(dtype, [&]<class T>(T*) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t id = a.ids[r];
      T* to = static_cast<T*>(a.output) + r * a.width;
      if (id < a.first_token || id >= a.end_token) {  // another rank has it
        std::fill_n(to, a.width, T(0.0f));
        continue;
      }
      const T* token = static_cast<const T*>(a.token_table) + (id - a.first_token) * a.width;
      const T* position = static_cast<const T*>(a.position_table) + (r % a.tokens) * a.width;
      ForEach(a.width, [&](auto d, int64_t i) HWY_ATTR {
        StoreAs(d, hn::Add(LoadAs(d, token + i), LoadAs(d, position + i)), to + i);
      });
    }
  });
}

template <class T, class G>
void ScatterRowsOf(const ScatterArrays& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    G* to = static_cast<G*>(a.target.data) + row * a.width;
    ForEach(a.width, [&](auto d, int64_t i) HWY_ATTR {
      auto sum = hn::Zero(d);
      for (int32_t p = a.starts[row]; p < a.starts[row + 1]; ++p) {
        sum = hn::Add(sum, LoadAs(d, static_cast<const T*>(a.output_gradient) +
                                         a.positions[p] * a.width + i));
      }
      StoreTo(d, sum, to + i, a.target.beta);
    });
  }
}

void ScatterRows(DType dtype, const ScatterArrays& arrays, int64_t begin, int64_t end) {
  WithType(dtype, [&]<class T>(T*) {
    WithType(arrays.target.dtype, [&]<class G>(G*) { ScatterRowsOf<T, G>(arrays, begin, end); });
  });
}

}  // namespace ebb::gpt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::gpt::cpu {
GPT_DISPATCH(EmbedRows, (DType dtype, const EmbedArrays& arrays, int64_t begin, int64_t end), dtype,
             arrays, begin, end)
GPT_DISPATCH(ScatterRows, (DType dtype, const ScatterArrays& arrays, int64_t begin, int64_t end),
             dtype, arrays, begin, end)
}  // namespace ebb::gpt::cpu
#endif
