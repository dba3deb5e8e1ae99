// An update's arrays in tests: their contents before an update, and their comparison after it.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "ebb/optim/split_master.h"
#include "ebb/optim/update_arrays.h"
#include "numbers.h"
#include "rules.h"

namespace ebb::optim {

template <class T>
using HostArray = std::vector<T>;

// In vectors of the host, or in arrays of a device.
template <class Gradient, class Parameter, template <class> class Array = HostArray>
struct UpdateMemory {
  Array<float> master, first, second, third;
  Array<Gradient> gradient;
  Array<Parameter> parameter;
  Array<uint16_t> low;

  UpdateArrays Part(int64_t begin, int64_t end, bool with_parameter,
                    MasterForm form = MasterForm::kWhole) {
    return {.master = form == MasterForm::kWhole ? master.data() + begin : nullptr,
            .gradient = gradient.data() + begin,
            .gradient_dtype = kDTypeOf<Gradient>,
            .states = {{first.data() + begin}, {second.data() + begin}, {third.data() + begin}},
            .parameter = with_parameter ? parameter.data() + begin : nullptr,
            .parameter_dtype = kDTypeOf<Parameter>,
            .master_low = form == MasterForm::kSplit ? low.data() + begin : nullptr,
            .rounding = {.unit = 8, .index = 77},
            .count = end - begin};
  }
};

template <class Gradient, class Parameter>
UpdateMemory<Gradient, Parameter> MemoryBeforeUpdate(int64_t count, const Rule& rule = kRules[0]) {
  return {.master = Numbers<float>(count, 1),
          .first = Numbers<float>(count, 2, RangeOfFirstState(rule)),
          .second = Numbers<float>(count, 3, Range::kPositive),
          .third = Numbers<float>(count, 5),
          .gradient = Numbers<Gradient>(count, 4),
          .parameter = std::vector<Parameter>(static_cast<size_t>(count)),
          .low = std::vector<uint16_t>(static_cast<size_t>(count))};
}

template <class T>
void ExpectBits(const std::vector<T>& seen, const std::vector<T>& expected, const char* what = "") {
  ASSERT_EQ(seen.size(), expected.size()) << what;
  for (size_t i = 0; i < seen.size(); ++i)
    ASSERT_EQ(Bits(seen[i]), Bits(expected[i])) << what << " " << i << " of " << seen.size();
}

template <class Gradient, class Parameter>
void ExpectBits(const UpdateMemory<Gradient, Parameter>& seen,
                const UpdateMemory<Gradient, Parameter>& expected, bool with_parameter = true) {
  ExpectBits(seen.master, expected.master, "master");
  ExpectBits(seen.first, expected.first, "state 0,");
  ExpectBits(seen.second, expected.second, "state 1,");
  ExpectBits(seen.third, expected.third, "state 2,");
  if (with_parameter) ExpectBits(seen.parameter, expected.parameter, "parameter");
  ASSERT_EQ(seen.low, expected.low);
}

// The two halves of each master, by its own arithmetic.
inline void SplitEach(const std::vector<float>& masters, std::vector<BFloat16>& parameters,
                      std::vector<uint16_t>& lows) {
  for (size_t i = 0; i < masters.size(); ++i) {
    parameters[i] = RoundHalfAway(masters[i]);
    lows[i] = LowHalf(masters[i]);
  }
}

}  // namespace ebb::optim
