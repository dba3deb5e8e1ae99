// The kernels of a step on a GPU against a copy on the device: bytes a second that they read and
// write, and as a fraction of what the copy reaches in the same run, in turns.
//
//   build/release/bin/gpu_kernels_bench [OUT.json]     77: there is no device
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "ebb/optim/kernels.h"
#include "ebb/runtime/device/device.h"
#include "nlohmann/json.hpp"

namespace ebb::optim {
namespace {

constexpr int64_t kCount = int64_t{1} << 27;  // 512 MiB of fp32: no cache holds it
constexpr int kRounds = 15, kCallsInARound = 5;
constexpr int kNoDevice = 77;

struct Case {
  std::string name;
  int64_t bytes_of_element = 0;
  std::function<void()> enqueue;
};

class Bench {
 public:
  explicit Bench(Device device)
      : device_(std::move(device)),
        kernels_(*Kernels::For(device_)),
        stream_(*device_.NewStream("bench")) {}

  nlohmann::json Run() {
    const std::vector<Case> cases = Cases();
    const Case copy = {"copy on the device", 8,
                       [&] { stream_.Copy(master_.data(), momentum_.data(), kCount * 4); }};
    nlohmann::json rows;
    std::printf("%s, %lld elements\n%-44s %9s %14s\n", device_.description().c_str(),
                static_cast<long long>(kCount), "", "GB/s", "of the copy's");
    for (const Case& each : cases) {
      std::vector<double> rates, ratios;
      for (int round = 0; round < kRounds; ++round) {
        const double reached = BytesPerSecond(copy);
        rates.push_back(BytesPerSecond(each));
        ratios.push_back(rates.back() / reached);
      }
      const double rate = Median(rates), ratio = Median(ratios);
      rows.push_back({{"kernel", each.name},
                      {"bytes_of_element", each.bytes_of_element},
                      {"gigabytes_per_second", rate / 1e9},
                      {"fraction_of_copy", ratio}});
      std::printf("%-44s %9.0f %14.3f\n", each.name.c_str(), rate / 1e9, ratio);
    }
    return {{"device", device_.description()}, {"elements", kCount}, {"kernels", rows}};
  }

  absl::Status status() const { return device_.status(); }

 private:
  std::vector<Case> Cases() {
    const auto gradient = [&](DType dtype) {
      return UpdateArrays{.gradient = gradient_.data(), .gradient_dtype = dtype, .count = kCount};
    };
    const auto states = [&](UpdateArrays arrays) {
      arrays.states[0] = reinterpret_cast<float*>(momentum_.data());
      arrays.states[1] = reinterpret_cast<float*>(variance_.data());
      return arrays;
    };
    UpdateArrays fp32 = states(gradient(DType::kFloat32));
    fp32.master = reinterpret_cast<float*>(master_.data());
    UpdateArrays half = states(gradient(DType::kBFloat16));
    half.master = fp32.master;
    half.parameter = parameter_.data();
    half.parameter_dtype = DType::kBFloat16;
    UpdateArrays split = half;
    split.master = nullptr;
    split.master_low = reinterpret_cast<uint16_t*>(master_.data());
    UpdateArrays without = half;
    without.master = nullptr;
    const auto update = [this](std::string name, int64_t bytes, const UpdateArrays& arrays) {
      return Case{std::move(name), bytes,
                  [this, arrays] { kernels_->Update(stream_, optimizer_, arrays, constants_); }};
    };
    const auto blocks = [this] {
      return std::span(reinterpret_cast<double*>(blocks_.data()),
                       static_cast<size_t>(NormBlocks(kCount)));
    };
    const AccumulateArrays add{.source = gradient_.data(),
                               .source_dtype = DType::kBFloat16,
                               .destination = master_.data(),
                               .count = kCount,
                               .add = true};
    return {
        update("AdamW, fp32", 28, fp32),
        update("AdamW, bf16 gradient and parameter", 28, half),
        update("AdamW, split master", 26, split),
        update("AdamW, stochastic rounding", 22, without),
        {"cast fp32 to bf16", 6,
         [this] {
           kernels_->Cast(stream_, master_.data(), DType::kFloat32, parameter_.data(),
                          DType::kBFloat16, kCount, Rounding::kParameter);
         }},
        {"cast bf16 to fp32", 6,
         [this] {
           kernels_->Cast(stream_, parameter_.data(), DType::kBFloat16, master_.data(),
                          DType::kFloat32, kCount, Rounding::kNearest);
         }},
        {"accumulate bf16 into fp32", 10, [this, add] { kernels_->Accumulate(stream_, add); }},
        {"accumulate bf16 into fp32, and norm", 10,
         [this, add, blocks] { kernels_->AccumulateAndSumSquares(stream_, add, blocks(), sum_); }},
        {"norm of fp32", 4, [this, blocks] {
           kernels_->SumOfSquares(stream_, master_.data(), DType::kFloat32, kCount, blocks(), sum_);
         }}};
  }

  double BytesPerSecond(const Case& each) {
    stream_.WaitIdle();
    const auto begin = std::chrono::steady_clock::now();
    for (int call = 0; call < kCallsInARound; ++call) each.enqueue();
    stream_.WaitIdle();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return static_cast<double>(each.bytes_of_element * kCount * kCallsInARound) / seconds;
  }

  static double Median(std::vector<double>& values) {
    const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  Buffer Memory(int64_t bytes) { return *device_.Allocate(bytes, "a benchmark"); }

  Device device_;
  std::unique_ptr<Kernels> kernels_;
  Stream stream_;
  const OptimizerConfig optimizer_ = {.weight_decay = 0.1};
  Buffer master_ = Memory(kCount * 4), momentum_ = Memory(kCount * 4),
         variance_ = Memory(kCount * 4), gradient_ = Memory(kCount * 4),
         parameter_ = Memory(kCount * 2), blocks_ = Memory(NormBlocks(kCount) * 8);
  Buffer shared_ = *device_.AllocateShared(4096, "a benchmark");
  double* const sum_ = reinterpret_cast<double*>(shared_.data());
  UpdateConstants* const constants_ = new (shared_.data() + 64) UpdateConstants(
      UpdateConstantsOf(optimizer_, {.learning_rate = 1e-5, .gradient_factor = 0.5f}));
};

int Main(int count, char** arguments) {
  absl::StatusOr<Device> device = Device::Cuda();
  if (!device.ok()) {
    std::fprintf(stderr, "gpu_kernels_bench: skipped: %s\n", device.status().ToString().c_str());
    return kNoDevice;
  }
  Bench bench(*std::move(device));
  const nlohmann::json result = bench.Run();
  if (absl::Status status = bench.status(); !status.ok()) {
    std::fprintf(stderr, "gpu_kernels_bench: %s\n", status.ToString().c_str());
    return 1;
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
  return 0;
}

}  // namespace
}  // namespace ebb::optim

int main(int count, char** arguments) {
  return ebb::optim::Main(count, arguments);
}
