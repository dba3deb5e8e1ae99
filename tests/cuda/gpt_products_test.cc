// Products that cuBLASLt refuses or does not offer, and which of several ways computes a product:
// on the stand-in. ../gpt/matmul_test.cc checks the results.
#include <cublasLt.h>
#include <gtest/gtest.h>

#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "absl/functional/function_ref.h"
#include "small_ops.h"
#include "stand_in.h"

namespace ebb::gpt::gpt_products_test {
namespace {

// A product in memory that the test reads too.
struct Products {
  DType dtype = DType::kFloat32;
  std::byte a[kRows * kWidth * 4] = {}, b[kWidth * kWidth * 4] = {}, bias[kWidth * 4] = {};
  std::byte c[kWidth * kWidth * 4] = {};

  void Fill() {
    const auto put = [&](std::byte* array, int64_t count, int64_t seed) {
      for (int64_t i = 0; i < count; ++i) {
        const float value = static_cast<float>((i * 37 + seed * 11) % 29 - 14) / 8;
        if (dtype == DType::kBFloat16) {
          reinterpret_cast<BFloat16*>(array)[i] = BFloat16(value);
        } else {
          reinterpret_cast<float*>(array)[i] = value;
        }
      }
    };
    put(a, kRows * kWidth, 1);
    put(b, kWidth * kWidth, 2);
    put(bias, kWidth, 3);
  }
};

enum class Form { kPlain, kTransposed, kBias };
constexpr Form kForms[] = {Form::kPlain, Form::kTransposed, Form::kBias};

void Multiply(Ops& ops, Products& p, Form form) {
  const bool transposed = form == Form::kTransposed;
  ops.Matmul({.a = p.a,
              .a_transposed = transposed,
              .b = p.b,
              .b_transposed = !transposed,
              .bias = form == Form::kBias ? p.bias : nullptr,
              .c = {p.c, p.dtype, 0},
              .m = transposed ? kWidth : kRows,
              .n = kWidth,
              .k = transposed ? kRows : kWidth});
}

class ProductsTest : public ::testing::TestWithParam<std::tuple<DType, Form>> {
 protected:
  ~ProductsTest() override { stand_in::Reset(); }

  // The ops' results after `disturb`.
  static std::string Results(absl::FunctionRef<void()> disturb) {
    const auto [dtype, form] = GetParam();
    const Device device = *Device::Cuda();
    Stream stream = device.CallerStream();
    const Buffer scratch = ScratchFor(device, dtype);
    const std::unique_ptr<Ops> ops = *NewOps(device, dtype, kLimits, scratch.span());
    const Buffer shared = *device.AllocateShared(sizeof(Products), "arrays");
    auto* const products = ::new (shared.data()) Products{.dtype = dtype};
    products->Fill();
    disturb();
    Multiply(*ops, *products, form);
    EXPECT_TRUE(ops->status().ok()) << ops->status();
    stream.WaitIdle();
    return {reinterpret_cast<const char*>(products->c), sizeof(products->c)};
  }
};

TEST_P(ProductsTest, AProductThatCublasLtRefusesAtItsLaunchIsComputedAnotherWay) {
  const std::string expected = Results([] {});
  for (const int code : {CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE})
    EXPECT_EQ(Results([code] { stand_in::FailCall("cublasLtMatmul", code); }), expected);
}

TEST_P(ProductsTest, AProductThatCublasLtDoesNotOfferIsComputedByAPlainKernel) {
  const std::string expected = Results([] {});
  EXPECT_EQ(Results(&stand_in::OfferNoProducts), expected);
}

TEST_P(ProductsTest, AProductThatIsRefusedAfterItHasRunIsAnError) {
  const auto [dtype, form] = GetParam();
  const Device device = *Device::Cuda();
  const Buffer scratch = ScratchFor(device, dtype);
  const std::unique_ptr<Ops> ops = *NewOps(device, dtype, kLimits, scratch.span());
  const Buffer shared = *device.AllocateShared(sizeof(Products), "arrays");
  auto* const products = ::new (shared.data()) Products{.dtype = dtype};
  Multiply(*ops, *products, form);
  stand_in::FailCall("cublasLtMatmul", CUBLAS_STATUS_NOT_SUPPORTED);
  Multiply(*ops, *products, form);
  EXPECT_EQ(ops->status().code(), absl::StatusCode::kInternal);
  device.CallerStream().WaitIdle();
}

std::string NameOfProduct(const ::testing::TestParamInfo<ProductsTest::ParamType>& product) {
  constexpr const char* kNames[] = {"Plain", "Transposed", "Bias"};
  return std::string(Name(std::get<0>(product.param))) +
         kNames[static_cast<int>(std::get<1>(product.param))];
}

INSTANTIATE_TEST_SUITE_P(Forms, ProductsTest,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::ValuesIn(kForms)),
                         NameOfProduct);

// Weight gradients with sums of a column, which can be fused, and plain products.
class MeasuredProductsTest : public ::testing::Test {
 protected:
  struct Memory {
    float a[kRows * kWidth] = {}, b[kRows * kWidth] = {}, c[kWidth * kWidth] = {},
                    sums[kWidth] = {};
  };
  ~MeasuredProductsTest() override {
    small_.stream.WaitIdle();
    stand_in::Reset();
  }

  static void SetTimes(uint32_t epilogue, const std::vector<int64_t>& seconds) {
    for (size_t i = 0; i < seconds.size(); ++i)
      stand_in::SetProductTime(epilogue, static_cast<int>(i), seconds[i] * 1'000'000'000);
  }
  // The letter of a new product after `choice`.
  std::string LetterOf(bool sums, const ProductChoice& choice) {
    Ops& ops = *small_.ops;
    ops.ChooseProducts(choice);
    Memory& memory = *small_.memory;
    ops.Matmul({.a = memory.a,
                .a_transposed = true,
                .b = memory.b,
                .c = {memory.c},
                .a_sums = {.data = sums ? memory.sums : nullptr},
                .m = kWidth,
                .n = kWidth,
                .k = kRows});
    EXPECT_TRUE(ops.status().ok()) << ops.status();
    return ops.product_letters();
  }

  SmallOpsOn<Memory> small_;
};

TEST_F(MeasuredProductsTest, SumsAreSeparateByDefault) {
  EXPECT_EQ(LetterOf(/*sums=*/true, {}), "a");
  EXPECT_EQ(LetterOf(/*sums=*/true, {}), "");  // it is settled already
}

TEST_F(MeasuredProductsTest, SumsAreFusedIfThatIsFaster) {
  SetTimes(CUBLASLT_EPILOGUE_DEFAULT, {20, 20, 20});
  SetTimes(CUBLASLT_EPILOGUE_BGRADB, {15, 10, 15});
  EXPECT_EQ(LetterOf(/*sums=*/true, {.measures = true, .letters = ""}), "B");
}

TEST_F(MeasuredProductsTest, SumsAreSeparateIfFusedOnesAreHardlyFaster) {
  SetTimes(CUBLASLT_EPILOGUE_DEFAULT, {100, 100, 100});
  SetTimes(CUBLASLT_EPILOGUE_BGRADB, {98, 98, 98});
  EXPECT_EQ(LetterOf(/*sums=*/true, {.measures = true, .letters = ""}), "a");
}

TEST_F(MeasuredProductsTest, TheFastestOfTheAlgorithmsIsTaken) {
  SetTimes(CUBLASLT_EPILOGUE_DEFAULT, {30, 20, 10});
  EXPECT_EQ(LetterOf(/*sums=*/false, {.measures = true, .letters = ""}), "c");
}

TEST_F(MeasuredProductsTest, LettersAreFollowedWithoutMeasuring) {
  SetTimes(CUBLASLT_EPILOGUE_DEFAULT, {30, 20, 10});
  EXPECT_EQ(LetterOf(/*sums=*/true, {.measures = false, .letters = "Cb"}), "C");
  EXPECT_EQ(LetterOf(/*sums=*/false, {.measures = false, .letters = "b"}), "b");
}

}  // namespace
}  // namespace ebb::gpt::gpt_products_test
