// Kernels of every device: arrays in its memory, and their results beside those of the CPU's free
// functions.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "ebb/optim/kernels.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/device/thread_team.h"
#include "numbers.h"
#include "rules.h"
#include "update_memory.h"

namespace ebb::optim {

struct Backend {
  std::string name;
  std::function<absl::StatusOr<Device>()> make;
};
inline void PrintTo(const Backend& backend, std::ostream* out) {
  *out << backend.name;
}

inline std::vector<Backend> Backends() {
  std::vector<Backend> backends = {{"cpu_1_thread", [] { return Device::Cpu(1); }},
                                   {"cpu_3_threads", [] { return Device::Cpu(3); }}};
  if (!absl::IsUnimplemented(Device::CudaDevices().status()))
    backends.push_back({"cuda", [] { return Device::Cuda(); }});
  return backends;
}

class KernelsTest : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    auto device = GetParam().make();
    if (absl::IsUnavailable(device.status())) GTEST_SKIP() << device.status();
    ASSERT_TRUE(device.ok()) << device.status();
    device_.push_back(*std::move(device));
    auto kernels = Kernels::For(device_[0]);
    ASSERT_TRUE(kernels.ok()) << kernels.status();
    kernels_ = *std::move(kernels);
    stream_.push_back(*device_[0].NewStream("kernels"));
  }
  void TearDown() override {
    for (const Device& device : device_) EXPECT_TRUE(device.status().ok()) << device.status();
  }

  Stream& stream() { return stream_[0]; }
  Kernels& kernels() { return *kernels_; }
  const Device& device() const { return device_[0]; }

  // Calls body(kernels, stream) in the stream's order, as an engine does.
  template <class Body>
  void Enqueue(const Body& body) {
    if (kernels_->enqueues()) return body(*kernels_, stream());
    stream().Enqueue([this, &body] { body(*kernels_, stream()); });
    stream().WaitIdle();
  }

  // Numbers in device memory; the first is `offset` numbers after an aligned address.
  template <class T>
  class Array {
   public:
    Array(KernelsTest& test, const std::vector<T>& values, int64_t offset = 0)
        : test_(test),
          count_(values.size()),
          offset_(static_cast<size_t>(offset)),
          buffer_(*test.device_[0].Allocate(Bytes(count_ + offset_ + 1), "test")) {
      Set(values);
    }
    T* data() { return reinterpret_cast<T*>(buffer_.data()) + offset_; }
    void Set(const std::vector<T>& values) {
      test_.stream().Copy(data(), values.data(), Bytes(count_));
      test_.stream().WaitIdle();
    }
    std::vector<T> Read() {
      std::vector<T> values(count_);
      test_.stream().Copy(values.data(), data(), Bytes(count_));
      test_.stream().WaitIdle();
      return values;
    }

   private:
    static int64_t Bytes(size_t count) { return static_cast<int64_t>(count * sizeof(T)); }

    KernelsTest& test_;
    const size_t count_, offset_;
    Buffer buffer_;
  };

  template <class From, class To>
  void ExpectCasts(const std::vector<From>& from, int64_t from_offset, int64_t to_offset) {
    ThreadTeam team(1);
    const auto count = static_cast<int64_t>(from.size());
    for (const Rounding rounding : {Rounding::kNearest, Rounding::kParameter}) {
      std::vector<To> expected(from.size());
      optim::Cast(team, from.data(), kDTypeOf<From>, expected.data(), kDTypeOf<To>, count,
                  rounding);
      Array<From> source(*this, from, from_offset);
      Array<To> to(*this, std::vector<To>(from.size()), to_offset);
      Enqueue([&](Kernels& kernels, Stream& stream) {
        kernels.Cast(stream, source.data(), kDTypeOf<From>, to.data(), kDTypeOf<To>, count,
                     rounding);
      });
      ExpectBits(to.Read(), expected);
    }
  }

  template <class From, class Via, class To>
  void ExpectCastsVia(int64_t count, int64_t offset) {
    ThreadTeam team(1);
    const auto from = Numbers<From>(count, 21);
    std::vector<Via> rounded(from.size());
    std::vector<To> expected(from.size());
    optim::Cast(team, from.data(), kDTypeOf<From>, rounded.data(), kDTypeOf<Via>, count,
                Rounding::kNearest);
    optim::Cast(team, rounded.data(), kDTypeOf<Via>, expected.data(), kDTypeOf<To>, count,
                Rounding::kNearest);
    Array<From> source(*this, from, offset);
    Array<To> to(*this, std::vector<To>(from.size()));
    Enqueue([&](Kernels& kernels, Stream& stream) {
      kernels.CastVia(stream, source.data(), kDTypeOf<From>, kDTypeOf<Via>, to.data(), kDTypeOf<To>,
                      count);
    });
    ExpectBits(to.Read(), expected);
  }

  template <class Source, class Destination>
  void ExpectAccumulates(int64_t count, int64_t offset, bool add) {
    SCOPED_TRACE(testing::Message() << count << " elements from " << offset);
    ThreadTeam team(1);
    const auto source = Numbers<Source>(count, 11);
    const auto before = Numbers<Destination>(count, 12);
    auto expected = before;
    AccumulateArrays arrays = {.source = source.data(),
                               .source_dtype = kDTypeOf<Source>,
                               .destination = expected.data(),
                               .destination_dtype = kDTypeOf<Destination>,
                               .count = count,
                               .add = add};
    std::vector<double> expected_blocks(static_cast<size_t>(NormBlocks(count)));
    const double expected_sum = optim::AccumulateAndSumSquares(team, arrays, expected_blocks);
    const double source_sum =
        optim::SumOfSquares(team, source.data(), kDTypeOf<Source>, count, expected_blocks);

    Array<Source> from(*this, source, offset);
    Array<Destination> first(*this, before, offset), second(*this, before, offset);
    Array<double> blocks(*this, std::vector<double>(expected_blocks.size(), 5));
    Array<double> sums(*this, {7, 7, 7});
    Enqueue([&](Kernels& kernels, Stream& stream) {
      const std::span<double> scratch(blocks.data(), expected_blocks.size());
      arrays.source = from.data();
      arrays.destination = first.data();
      kernels.Accumulate(stream, arrays);
      arrays.destination = second.data();
      kernels.AccumulateAndSumSquares(stream, arrays, scratch, sums.data());
      kernels.SumOfSquares(stream, from.data(), kDTypeOf<Source>, count, scratch, sums.data() + 1);
    });
    ExpectBits(first.Read(), expected);
    ExpectBits(second.Read(), expected);
    EXPECT_EQ(sums.Read(), (std::vector<double>{expected_sum, source_sum, 7}));
  }

  // The contents of `memory` in device memory.
  template <class Gradient, class Parameter>
  UpdateMemory<Gradient, Parameter, Array> OnDevice(const UpdateMemory<Gradient, Parameter>& memory,
                                                    int64_t offset) {
    return {{*this, memory.master, offset},   {*this, memory.first, offset},
            {*this, memory.second, offset},   {*this, memory.third, offset},
            {*this, memory.gradient, offset}, {*this, memory.parameter, offset},
            {*this, memory.low, offset}};
  }
  template <class Gradient, class Parameter>
  static UpdateMemory<Gradient, Parameter> OnHost(
      UpdateMemory<Gradient, Parameter, Array>& memory) {
    return {memory.master.Read(), memory.first.Read(),    memory.second.Read(),
            memory.third.Read(),  memory.gradient.Read(), memory.parameter.Read(),
            memory.low.Read()};
  }

  template <class Gradient, class Parameter>
  void ExpectUpdates(const Rule& rule, int64_t count, int64_t offset, bool with_parameter,
                     MasterForm form = MasterForm::kWhole) {
    SCOPED_TRACE(testing::Message() << count << " elements from " << offset);
    ThreadTeam team(1);
    auto expected = MemoryBeforeUpdate<Gradient, Parameter>(count, rule);
    std::vector<Parameter> parameter_in(expected.parameter.size());
    if constexpr (std::is_same_v<Parameter, BFloat16>) {
      if (form != MasterForm::kWhole) SplitEach(expected.master, parameter_in, expected.low);
    }
    auto memory = OnDevice(expected, offset);
    Array<Parameter> parameter_in_on_device(*this, parameter_in, offset);
    const auto arrays_of = [&](auto& of, const Parameter* in) {
      UpdateArrays arrays = of.Part(0, count, with_parameter, form);
      if (form != MasterForm::kWhole) arrays.parameter_in = in;
      return arrays;
    };
    const UpdateConstants constants = UpdateConstantsOf(rule.optimizer, rule.scalars);
    UpdateConstants not_applied = constants;
    not_applied.apply = false;
    Array<UpdateConstants> read(*this, {not_applied});
    const auto update = [&] {
      Enqueue([&](Kernels& kernels, Stream& stream) {
        kernels.Update(stream, rule.optimizer, arrays_of(memory, parameter_in_on_device.data()),
                       read.data());
      });
    };
    update();
    ExpectBits(OnHost(memory), expected);
    optim::Update(team, rule.optimizer, arrays_of(expected, parameter_in.data()), rule.scalars);
    read.Set({constants});
    update();
    ExpectBits(OnHost(memory), expected);
  }

 private:
  std::vector<Device> device_;  // none if the test is skipped
  std::unique_ptr<Kernels> kernels_;
  std::vector<Stream> stream_;
};

}  // namespace ebb::optim
