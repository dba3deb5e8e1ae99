// The passes over elements that cuBLASLt may do instead (../gpt/kernels_test.cc tries cuBLASLt
// first), at addresses that are aligned and that are not. This file is part of two programs. One of
// them uses the real CUDA runtime, and skips its tests without a device.
#include <cmath>
#include <utility>

#include "../gpt/ops_fixture.h"
#include "../gpt/reference.h"
#include "ops/cuda/kernels.h"

namespace ebb::gpt {
namespace {

// The first numbers are neither read nor written.
class ElementWiseTest : public OpsTest {
 protected:
  static void* From(Array& array, int64_t first) {
    return static_cast<std::byte*>(array.data()) + first * SizeOf(array.dtype());
  }
  template <class Launch>
  static void Run(const Launch& launch) {
    const Device device = NewDevice(1);
    EXPECT_EQ(cuda::LoadElementWiseKernels(Compute()), cudaSuccess);
    Stream stream = device.CallerStream();
    EXPECT_EQ(launch(static_cast<cudaStream_t>(stream.view().native)), cudaSuccess);
    stream.WaitIdle();
    EXPECT_TRUE(stream.status().ok()) << stream.status();
  }
  static Array After(const Array& array, int64_t first) {
    Array rest(array.dtype(), array.size() - first);
    for (int64_t i = first; i < array.size(); ++i) rest.Set(i - first, array[i]);
    return rest;
  }
};

TEST_P(ElementWiseTest, GeluAndItsBackwardAgreeWithFp64) {
  for (int64_t first : {0, 1}) {
    const int64_t count = 9001;
    Array x = Random(first + count, 1, 3), gradient = Random(first + count, 2),
          y = Empty(first + count), again = Empty(first + count);
    int64_t at = 4000;
    for (double extreme : {-1e30, -100.0, -20.0, 0.0, 20.0, 100.0, 1e30}) x.Set(at++, extreme);
    const std::vector<double> dy = After(gradient, first).Values();
    Run([&](cudaStream_t stream) {
      return cuda::LaunchGelu(stream, Compute(), From(x, first), From(y, first), count);
    });
    Run([&](cudaStream_t stream) {
      return cuda::LaunchGeluBackward(stream, Compute(), From(x, first), From(again, first),
                                      From(gradient, first), count);
    });
    y = After(y, first), again = After(again, first), x = After(x, first);
    EXPECT_EQ(y, again);
    const Array dx = After(gradient, first);
    for (int64_t i = 0; i < count; ++i) {
      const double e = reference::Gelu(x[i]), v = x[i];
      const double slope =
          std::abs(v) > 50 ? v > 0 : (reference::Gelu(v + 1e-5) - reference::Gelu(v - 1e-5)) / 2e-5;
      if (std::isinf(v)) continue;  // beyond fp16
      ASSERT_NEAR(y[i], e, Rounding(Compute()) * std::abs(e) + 1e-6 * std::abs(v) + 0x1p-25) << v;
      const double d = dy[static_cast<size_t>(i)] * slope;
      ASSERT_NEAR(dx[i], d, Rounding(Compute()) * std::abs(d) + 2e-5) << v;
    }
  }
}

TEST_P(ElementWiseTest, AddAgreesWithFp64InPlace) {
  for (int64_t first : {0, 1}) {
    Array a = Random(first + 4100, 1), b = Random(first + 4100, 2);
    std::vector<double> expected;
    for (int64_t i = first; i < a.size(); ++i) expected.push_back(a[i] + b[i]);
    Run([&](cudaStream_t stream) {
      return cuda::LaunchAdd(stream, Compute(), From(a, first), From(b, first), From(a, first),
                             4100);
    });
    ExpectClose(After(a, first), expected, 0, "add");
  }
}

TEST_P(ElementWiseTest, ColumnSumsAgreeWithFp64) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 8}, {300, 264}, {131, 33}}) {
    Array matrix = Random(rows * columns, 1);
    std::pmr::vector<float> partials(static_cast<size_t>(cuda::ColumnSumsParts(rows) * columns));
    for (DType dtype : kComputeTypes) {
      Array sums = Array::Random(dtype, columns, 2);
      std::vector<double> expected = sums.Values();
      for (int64_t i = 0; i < rows * columns; ++i)
        expected[static_cast<size_t>(i % columns)] += matrix[i];
      Run([&, rows = rows, columns = columns](cudaStream_t stream) {
        return cuda::LaunchColumnSums(stream, Compute(), matrix.data(), rows, columns,
                                      partials.data(), {sums.data(), dtype, 1});
      });
      ExpectClose(sums, expected, 4e-6, "column sums");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, ElementWiseTest, testing::ValuesIn(OpsCases({DeviceKind::kCuda})),
                         OpsTestName);

}  // namespace
}  // namespace ebb::gpt
