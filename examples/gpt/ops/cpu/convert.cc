#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/convert.cc"
#include <type_traits>

#include "cpu_targets.h"
#include "hwy/foreach_target.h"  // after cpu_targets.h, before highway.h
#include "hwy/highway.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::gpt::cpu::HWY_NAMESPACE {

void Widen(DType dtype, Block source, int64_t rows, int64_t columns, float* destination) {
  WithType(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
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
  WithType(arrays.target.dtype, [&](auto* type) {
    using G = std::remove_pointer_t<decltype(type)>;
    WithType(arrays.bias_dtype, [&](auto* bias_type) {
      StoreOf<G, std::remove_pointer_t<decltype(bias_type)>>(arrays, rows, columns);
    });
  });
}

}  // namespace ebb::gpt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::gpt::cpu {
HWY_EXPORT(Widen);
HWY_EXPORT(Store);
void Widen(DType dtype, Block source, int64_t rows, int64_t columns, float* destination) {
  HWY_DYNAMIC_DISPATCH(Widen)(dtype, source, rows, columns, destination);
}
void Store(const StoreArrays& arrays, int64_t rows, int64_t columns) {
  HWY_DYNAMIC_DISPATCH(Store)(arrays, rows, columns);
}
}  // namespace ebb::gpt::cpu
#endif
