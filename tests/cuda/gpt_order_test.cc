// The stand-in sees which memory gpt's kernels touch. It finds a stream that uses a kernel's memory
// without an order between them, and names the kernel.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "ebb/runtime/device/device.h"
#include "ops/ops.h"
#include "order.h"
#include "small_ops.h"

namespace ebb::gpt::gpt_order_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Device memory. An op reads `read` and writes `written`.
struct Memory {
  float read[3 * kRows * kWidth], written[3 * kRows * kWidth];
  float square[kWidth * kWidth], more[3 * kRows * kWidth], sums[kRows], others[kRows], unused[1];
  int32_t ids[kRows];
};

struct Case {
  const char* kernel;
  std::function<void(Ops&, Memory&)> call;
};
void PrintTo(const Case& tested, std::ostream* out) {
  *out << tested.kernel;
}

std::vector<Case> Cases() {
  return {
      {"NormKernel",
       [](Ops& ops, Memory& m) {
         ops.Norm({.input = m.read,
                   .weight = m.square,
                   .bias = m.square,
                   .output = m.written,
                   .mean = m.sums,
                   .reciprocal_deviation = m.others,
                   .rows = kRows,
                   .width = kWidth});
       }},
      {"NormBackwardKernel",
       [](Ops& ops, Memory& m) {
         ops.NormBackward({.input = m.more,
                           .weight = m.square,
                           .mean = m.sums,
                           .reciprocal_deviation = m.others,
                           .output_gradient = m.read,
                           .input_gradient = m.written,
                           .weight_gradient = {m.square + kWidth},
                           .bias_gradient = {m.square + 2 * kWidth},
                           .rows = kRows,
                           .width = kWidth});
       }},
      {"PlainAttentionForward",
       [](Ops& ops, Memory& m) {
         ops.Attention({.qkv = m.read,
                        .output = m.written,
                        .log_sum_exp = m.sums,
                        .sequences = 1,
                        .tokens = kRows,
                        .heads = 1,
                        .width = kWidth});
       }},
      {"PlainAttentionQueryGradients",
       [](Ops& ops, Memory& m) {
         ops.AttentionBackward({.qkv = m.more,
                                .output = m.read,
                                .output_gradient = m.square,
                                .log_sum_exp = m.sums,
                                .qkv_gradient = m.written,
                                .sequences = 1,
                                .tokens = kRows,
                                .heads = 1,
                                .width = kWidth});
       }},
      {"CrossEntropyKernel",
       [](Ops& ops, Memory& m) {
         ops.CrossEntropy({.logits = m.read,
                           .targets = m.ids,
                           .losses = m.sums,
                           .gradient = m.written,
                           .rows = kRows,
                           .vocabulary = kWidth});
       }},
      {"EmbedKernel",
       [](Ops& ops, Memory& m) {
         ops.Embed({.token_table = m.read,
                    .position_table = m.more,
                    .ids = m.ids,
                    .output = m.written,
                    .sequences = 1,
                    .tokens = kRows,
                    .width = kWidth});
       }},
      {"TableSumsKernel",
       [](Ops& ops, Memory& m) {
         ops.EmbedBackward({.output_gradient = m.read,
                            .ids = m.ids,
                            .token_gradient = {m.written},
                            .position_gradient = {m.more},
                            .sequences = 1,
                            .tokens = kRows,
                            .width = kWidth,
                            .vocabulary = kWidth,
                            .context = kRows});
       }},
      {"MeanKernel", [](Ops& ops, Memory& m) { ops.Mean(m.read, kRows, m.written); }},
      {"cublasLtMatmul", [](Ops& ops, Memory& m) {
         ops.Matmul(
             {.a = m.read, .b = m.square, .c = {m.written}, .m = kRows, .n = kWidth, .k = kWidth});
       }}};
}

class GptOrderTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    stand_in::WatchOrder();
    small_.stream.Zero(memory_.data(), sizeof(Memory));
    small_.stream.WaitIdle();
  }
  void TearDown() override { stand_in::TakeRaces(); }

  Memory& memory() { return *reinterpret_cast<Memory*>(memory_.data()); }
  // Runs the op, which has ended before more is enqueued, although no stream knows.
  void Call() {
    GetParam().call(*small_.ops, memory());
    EXPECT_TRUE(small_.ops->status().ok()) << small_.ops->status();
    std::thread([this] { small_.stream.WaitIdle(); }).join();
  }

  SmallOps small_;
  Buffer memory_ = *small_.device.Allocate(sizeof(Memory), "test");
  Stream other_ = *small_.device.NewStream("other");
  Event event_ = *small_.device.NewEvent();
};

TEST_P(GptOrderTest, WritingMemoryThatAKernelReadsIsFound) {
  Call();
  other_.Zero(memory().read, 4);
  EXPECT_THAT(stand_in::TakeRaces(),
              AllOf(Not(IsEmpty()), Each(AllOf(HasSubstr("cudaMemsetAsync"), HasSubstr("writes"),
                                               HasSubstr(GetParam().kernel)))));
}

TEST_P(GptOrderTest, TouchingMemoryThatAKernelWritesIsFound) {
  Call();
  other_.Copy(memory().unused, memory().written, 4);
  EXPECT_THAT(stand_in::TakeRaces(),
              AllOf(Not(IsEmpty()), Each(AllOf(HasSubstr("cudaMemcpyAsync"), HasSubstr("reads"),
                                               HasSubstr(GetParam().kernel)))));
}

TEST_P(GptOrderTest, AnEventOrdersAllAccesses) {
  Call();
  small_.stream.Record(event_);
  other_.Wait(event_);
  other_.Zero(memory().read, sizeof(Memory::read));
  other_.Zero(memory().written, sizeof(Memory::written));
  other_.Record(event_);
  small_.stream.Wait(event_);
  Call();
  EXPECT_THAT(stand_in::TakeRaces(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Kernels, GptOrderTest, ::testing::ValuesIn(Cases()),
                         [](const ::testing::TestParamInfo<Case>& tested) {
                           return std::string(tested.param.kernel);
                         });

}  // namespace
}  // namespace ebb::gpt::gpt_order_test
