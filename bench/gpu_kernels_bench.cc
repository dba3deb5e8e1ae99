// The kernels of a step on a GPU against a copy on the device: the bytes that they read and write
// in a second, and the fraction of the rate of a copy of as many elements, in turns in one run.
// Calls for a unit go through the arrays in order, as in a step. Also measures the rate of a large
// bf16 product by gpt's ops, the base of utilisation.
//
//   build/release/bin/gpu_kernels_bench [OUT.json]     77: there is no device
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ebb/optim/kernels.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/device.h"
#include "nlohmann/json.hpp"
#include "ops/ops.h"

namespace ebb::optim {
namespace {

constexpr int64_t kCount = int64_t{1} << 27;  // 512 MiB of fp32: no cache holds it
constexpr int64_t kUnit = int64_t{1} << 22;   // a unit's shard: about half a block of GPT-2 124M
constexpr int kRounds = 15, kPassesInARound = 5;
constexpr int64_t kMatrix = 8192;
constexpr int kProducts = 10, kProductRounds = 5;
// The runs of an update with different options: a matrix and a vector in turn.
constexpr int64_t kPairs = 4, kVector = 1600;
constexpr int64_t kRuns = kCount / kUnit * kPairs * 2;
constexpr int64_t kConstantsBytes = 256;
constexpr int64_t kReadBytes = kConstantsBytes + kRuns * int64_t{sizeof(UpdateRun)};
constexpr int kNoDevice = 77;

struct Case {
  std::string name;
  int64_t bytes_of_element = 0;
  std::function<void(int64_t first, int64_t count)> enqueue;
};

double Seconds(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

class Bench {
 public:
  explicit Bench(Device device)
      : device_(std::move(device)),
        kernels_(*Kernels::For(device_)),
        stream_(*device_.NewStream("bench")) {
    const auto constants = std::span(reinterpret_cast<UpdateConstants*>(shared_.data()), 2);
    std::uninitialized_fill(
        constants.begin(), constants.end(),
        UpdateConstantsOf(optimizer_, {.learning_rate = 1e-5, .gradient_factor = 0.5f}));
    auto* run = reinterpret_cast<UpdateRun*>(shared_.data() + kConstantsBytes);
    for (int64_t end = kUnit / kPairs; end <= kCount; end += kUnit / kPairs) {
      new (run++) UpdateRun{.end = end - kVector, .set = 0};
      new (run++) UpdateRun{.end = end, .set = 1};
    }
    stream_.Copy(read_.data(), shared_.data(), kReadBytes);
    stream_.WaitIdle();
  }

  // Runs calls of `count` elements each.
  nlohmann::json Run(int64_t count) {
    const Case copy = {"copy on the device", 8, [&](int64_t first, int64_t elements) {
                         stream_.Copy(Fp32(master_) + first, Fp32(momentum_) + first, elements * 4);
                       }};
    nlohmann::json rows;
    const std::string head = "calls for " + std::to_string(count) + " elements each";
    std::printf("\n%-44s %9s %14s\n", head.c_str(), "GB/s", "of the copy's");
    for (const Case& each : Cases()) {
      std::vector<double> rates, ratios;
      for (int round = 0; round < kRounds; ++round) {
        const double reached = BytesPerSecond(copy, count);
        rates.push_back(BytesPerSecond(each, count));
        ratios.push_back(rates.back() / reached);
      }
      const double rate = Median(rates), ratio = Median(ratios);
      rows.push_back({{"kernel", each.name},
                      {"elements_of_call", count},
                      {"bytes_of_element", each.bytes_of_element},
                      {"gigabytes_per_second", rate / 1e9},
                      {"fraction_of_copy", ratio}});
      std::printf("%-44s %9.0f %14.3f\n", each.name.c_str(), rate / 1e9, ratio);
    }
    return rows;
  }

  // FLOP/s of products of kMatrix^3, in the best round. The numbers are random, because power
  // limits clocks.
  absl::StatusOr<double> ProductRate() {
    const gpt::OpsLimits limits = {.rows = kMatrix, .width = kMatrix};
    const Buffer scratch = Memory(gpt::ScratchBytes(device_, DType::kBFloat16, limits));
    EBB_ASSIGN_OR_RETURN(const std::unique_ptr<gpt::Ops> ops,
                         gpt::NewOps(device_, DType::kBFloat16, limits, scratch.span()));
    EBB_RETURN_IF_ERROR(FillWithRandomNumbers(master_));
    EBB_RETURN_IF_ERROR(FillWithRandomNumbers(momentum_));
    const gpt::MatmulArrays product = {.a = master_.data(),
                                       .b = momentum_.data(),
                                       .c = {.data = variance_.data(), .dtype = DType::kBFloat16},
                                       .m = kMatrix,
                                       .n = kMatrix,
                                       .k = kMatrix};
    Stream stream = device_.CallerStream();
    double best = 0;
    for (int round = 0; round <= kProductRounds; ++round) {
      const double seconds = Seconds([&] {
        for (int i = 0; i < kProducts; ++i) ops->Matmul(product);
        stream.WaitIdle();
      });
      const bool warms_up = round == 0;
      if (!warms_up) best = std::max(best, kProducts * 2.0 * kMatrix * kMatrix * kMatrix / seconds);
    }
    EBB_RETURN_IF_ERROR(ops->status());
    EBB_RETURN_IF_ERROR(device_.status());
    return best;
  }

  const Device& device() const { return device_; }

 private:
  static float* Fp32(const Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }
  static std::byte* At(const Buffer& buffer, DType dtype, int64_t element) {
    return buffer.data() + element * SizeOf(dtype);
  }

  std::vector<Case> Cases() {
    constexpr DType kHalf = DType::kBFloat16, kWide = DType::kFloat32;
    const auto update = [this](std::string name, int64_t bytes, MasterForm form, DType dtype) {
      return Case{std::move(name), bytes, [this, form, dtype](int64_t first, int64_t count) {
                    kernels_->Update(stream_, optimizer_, Arrays(form, dtype, first, count),
                                     constants_.data());
                  }};
    };
    const auto update_runs = [this](int64_t first, int64_t count) {
      constexpr int64_t kRun = kUnit / (2 * kPairs);  // elements, on average
      kernels_->Update(
          stream_, UpdateRuleOf(optimizer_), Arrays(MasterForm::kWhole, kHalf, first, count),
          {.constants = constants_,
           .runs =
               runs_.subspan(static_cast<size_t>(first / kRun), static_cast<size_t>(count / kRun)),
           .begin = first});
    };
    const auto cast = [this](std::string name, const Buffer& from, DType source, const Buffer& to,
                             DType destination, Rounding rounding) {
      return Case{std::move(name), 6, [=, this, &from, &to](int64_t first, int64_t count) {
                    kernels_->Cast(stream_, At(from, source, first), source,
                                   At(to, destination, first), destination, count, rounding);
                  }};
    };
    const auto norm = [this](std::string name, const Buffer& of, DType dtype) {
      return Case{std::move(name), SizeOf(dtype), [=, this, &of](int64_t first, int64_t count) {
                    kernels_->SumOfSquares(stream_, At(of, dtype, first), dtype, count,
                                           Blocks(count), sum_);
                  }};
    };
    const auto sum = [this](int64_t first, int64_t count) {
      return AccumulateArrays{.source = At(gradient_, kHalf, first),
                              .source_dtype = kHalf,
                              .destination = At(master_, kWide, first),
                              .count = count,
                              .add = true};
    };
    return {update("AdamW, fp32", 28, MasterForm::kWhole, kWide),
            update("AdamW, bf16 gradient and parameter", 28, MasterForm::kWhole, kHalf),
            update("AdamW, split master", 26, MasterForm::kSplit, kHalf),
            update("AdamW, stochastic rounding", 22, MasterForm::kParameter, kHalf),
            {"AdamW, bf16, 8 runs in 4 Mi elements", 28, update_runs},
            cast("cast fp32 to bf16", master_, kWide, parameter_, kHalf, Rounding::kParameter),
            cast("cast bf16 to fp32", parameter_, kHalf, master_, kWide, Rounding::kNearest),
            {"accumulate bf16 into fp32", 10,
             [this, sum](int64_t first, int64_t count) {
               kernels_->Accumulate(stream_, sum(first, count));
             }},
            {"accumulate bf16 into fp32, and norm", 10,
             [this, sum](int64_t first, int64_t count) {
               kernels_->AccumulateAndSumSquares(stream_, sum(first, count), Blocks(count), sum_);
             }},
            // The kernels of a step of one round, and of one that accumulates.
            norm("norm of bf16", gradient_, kHalf),
            norm("norm of fp32", master_, kWide)};
  }

  UpdateArrays Arrays(MasterForm form, DType dtype, int64_t first, int64_t count) const {
    UpdateArrays arrays{
        .gradient = At(gradient_, dtype, first), .gradient_dtype = dtype, .count = count};
    arrays.states[0].codes = Fp32(momentum_) + first;
    arrays.states[1].codes = Fp32(variance_) + first;
    if (form == MasterForm::kWhole) arrays.master = Fp32(master_) + first;
    if (form == MasterForm::kSplit)
      arrays.master_low = reinterpret_cast<uint16_t*>(master_.data()) + first;
    if (dtype != DType::kFloat32) {
      arrays.parameter = At(parameter_, dtype, first);
      arrays.parameter_dtype = dtype;
    }
    return arrays;
  }

  std::span<double> Blocks(int64_t count) const {
    return {reinterpret_cast<double*>(blocks_.data()), static_cast<size_t>(NormBlocks(count))};
  }

  double BytesPerSecond(const Case& each, int64_t count) {
    stream_.WaitIdle();
    const double seconds = Seconds([&] {
      for (int pass = 0; pass < kPassesInARound; ++pass)
        for (int64_t first = 0; first < kCount; first += count) each.enqueue(first, count);
      stream_.WaitIdle();
    });
    return static_cast<double>(each.bytes_of_element * kCount * kPassesInARound) / seconds;
  }

  static double Median(std::vector<double>& values) {
    const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  absl::Status FillWithRandomNumbers(const Buffer& matrix) {
    constexpr int64_t kPiece = int64_t{1} << 20;
    static_assert(kMatrix * kMatrix % kPiece == 0);
    EBB_ASSIGN_OR_RETURN(const Buffer piece, device_.AllocateShared(kPiece * 2, "random numbers"));
    std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    auto* const numbers = reinterpret_cast<BFloat16*>(piece.data());
    std::generate_n(numbers, kPiece, [&] { return BFloat16(normal(engine)); });
    for (int64_t first = 0; first < kMatrix * kMatrix; first += kPiece)
      stream_.Copy(At(matrix, DType::kBFloat16, first), piece.data(), kPiece * 2);
    stream_.WaitIdle();
    return device_.status();
  }

  Buffer Memory(int64_t bytes) { return *device_.Allocate(bytes, "a benchmark"); }

  Device device_;
  std::unique_ptr<Kernels> kernels_;
  Stream stream_;
  const OptimizerConfig optimizer_ = {.weight_decay = 0.1};
  Buffer master_ = Memory(kCount * 4), momentum_ = Memory(kCount * 4),
         variance_ = Memory(kCount * 4), gradient_ = Memory(kCount * 4),
         parameter_ = Memory(kCount * 2), blocks_ = Memory(NormBlocks(kCount) * 8);
  Buffer shared_ = *device_.AllocateShared(kReadBytes, "a benchmark");
  double* const sum_ = reinterpret_cast<double*>(shared_.data());  // valid after the rest is copied
  // In device memory, as in an engine.
  Buffer read_ = Memory(kReadBytes);
  const std::span<const UpdateConstants> constants_ = {
      reinterpret_cast<const UpdateConstants*>(read_.data()), 2};
  const std::span<const UpdateRun> runs_ = {
      reinterpret_cast<const UpdateRun*>(read_.data() + kConstantsBytes), size_t{kRuns}};
};

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "gpu_kernels_bench: %s\n", status.ToString().c_str());
  return 1;
}

int Main(int count, char** arguments) {
  absl::StatusOr<Device> device = Device::Cuda();
  if (!device.ok()) {
    std::fprintf(stderr, "gpu_kernels_bench: skipped: %s\n", device.status().ToString().c_str());
    return kNoDevice;
  }
  Bench bench(*std::move(device));
  nlohmann::json result = {{"device", bench.device().description()}};
  std::printf("%s\n", bench.device().description().c_str());
  for (const int64_t elements : {kCount, kUnit})
    for (const nlohmann::json& row : bench.Run(elements)) result["kernels"].push_back(row);
  if (const absl::Status status = bench.device().status(); !status.ok()) return Fail(status);
  const absl::StatusOr<double> rate = bench.ProductRate();
  if (rate.ok()) {
    std::printf("\nbf16 product of %lld^3: %.1f TFLOP/s\n", static_cast<long long>(kMatrix),
                *rate / 1e12);
    result["matrix_size"] = kMatrix;
    result["matrix_tflops"] = *rate / 1e12;
  }
  if (count > 1) {
    std::FILE* const file = std::fopen(arguments[1], "w");
    if (file == nullptr) {
      std::perror(arguments[1]);
      return 1;
    }
    std::fprintf(file, "%s\n", result.dump(2).c_str());
    std::fclose(file);
  }
  return rate.ok() ? 0 : Fail(rate.status());
}

}  // namespace
}  // namespace ebb::optim

int main(int count, char** arguments) {
  return ebb::optim::Main(count, arguments);
}
