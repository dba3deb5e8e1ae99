// Operations that are cut into many steps, moved by several threads, or read in place: on device
// buffers and on other memory, which backends may move in different ways.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "backends.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/device.h"
#include "numbers.h"

namespace ebb {
namespace {

using ebb::testing::Numbers;
using ebb::testing::ReduceReference;

constexpr int kRanks = 3;
const std::vector<int64_t> kCounts = {30'003, 0, 1, 15'000, 517};

enum class Memory { kBuffers, kOther, kBuffersOnSomeRanks };
void PrintTo(Memory memory, std::ostream* out) {
  constexpr const char* kNames[] = {"buffers", "other", "buffers_on_some_ranks"};
  *out << kNames[static_cast<int>(memory)];
}

// Both sides of all spans, kRanks times each count, in one piece of memory.
class Arena {
 public:
  Arena(const Device& device, DType dtype, bool in_buffer) : dtype_(dtype) {
    int64_t bytes = 0;
    for (const int64_t count : kCounts) bytes += 2 * RoundUp(kRanks * count * SizeOf(dtype));
    if (in_buffer) {
      buffer_ = *device.Allocate(bytes, "both sides");
    } else {
      other_.resize(static_cast<size_t>(bytes));
    }
    std::byte* next = in_buffer ? buffer_.data() : other_.data();
    for (const int64_t count : kCounts) {
      const int64_t side = RoundUp(kRanks * count * SizeOf(dtype));
      spans_.push_back({.send = next, .receive = next + side, .count = count});
      next += 2 * side;
    }
  }
  std::span<const CollectiveSpan> spans() const { return spans_; }
  void Send(size_t span, const Numbers& numbers) {
    std::copy_n(numbers.at(0), Bytes(numbers.size()),
                static_cast<std::byte*>(const_cast<void*>(spans_[span].send)));
  }
  Numbers Received(size_t span, int64_t count) const {
    Numbers numbers(dtype_, count);
    std::copy_n(static_cast<const std::byte*>(spans_[span].receive), Bytes(count), numbers.at(0));
    return numbers;
  }

 private:
  static int64_t RoundUp(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  size_t Bytes(int64_t count) const { return static_cast<size_t>(count * SizeOf(dtype_)); }

  const DType dtype_;
  Buffer buffer_;
  std::vector<std::byte> other_;
  std::vector<CollectiveSpan> spans_;
};

Numbers Sent(DType dtype, int rank, size_t span) {
  Numbers numbers(dtype, kRanks * kCounts[span]);
  numbers.Fill(static_cast<uint64_t>(rank) * 1000 + span);
  return numbers;
}

class LargeOperations
    : public ::testing::TestWithParam<std::tuple<ebb::testing::Backend, DType, Memory, int>> {};

TEST_P(LargeOperations, GiveTheSameBits) {
  const auto& [backend, dtype_bound, memory_bound, threads_bound] = GetParam();
  const DType dtype = dtype_bound;
  const Memory memory = memory_bound;
  const int threads = threads_bound;
  // Numbers that all ranks send, and their sum, by span.
  std::vector<std::vector<Numbers>> sent;
  std::vector<Numbers> sums;
  for (size_t s = 0; s < kCounts.size(); ++s) {
    std::vector<Numbers>& of_ranks = sent.emplace_back();
    for (int rank = 0; rank < kRanks; ++rank) of_ranks.push_back(Sent(dtype, rank, s));
    Numbers& sum = sums.emplace_back(dtype, kRanks * kCounts[s]);
    for (int64_t i = 0; i < sum.size(); ++i) {
      std::vector<float> inputs;
      for (const Numbers& numbers : of_ranks) inputs.push_back(numbers.Get(i));
      sum.Set(i, ReduceReference(inputs, ReduceOp::kSum, 0, 0.3f));
    }
  }
  const absl::Status status = backend.run(kRanks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator c, world.NewCommunicator());
    const int me = world.rank();
    const Device device = backend.device(threads);
    EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
    Arena arena(device, dtype,
                memory == Memory::kBuffers || (memory == Memory::kBuffersOnSomeRanks && me != 1));
    for (size_t s = 0; s < kCounts.size(); ++s) arena.Send(s, sent[s][static_cast<size_t>(me)]);
    const auto check = [&](absl::Status called, const char* what, auto expected) -> absl::Status {
      EBB_RETURN_IF_ERROR(called);
      stream.WaitIdle();
      EBB_RETURN_IF_ERROR(c.status());
      for (size_t s = 0; s < kCounts.size(); ++s) {
        const Numbers wanted = expected(s, kCounts[s]);
        if (!(arena.Received(s, wanted.size()) == wanted))
          return absl::InternalError(std::string(what) + ": span " + std::to_string(s));
      }
      return absl::OkStatus();
    };
    const auto part = [&](const Numbers& of, int64_t from, int64_t count) {
      Numbers numbers(dtype, count);
      numbers.CopyFrom(of, from, 0, count);
      return numbers;
    };
    const auto blocks = [&](size_t s, int64_t count, bool mine) {
      Numbers numbers(dtype, kRanks * count);
      for (int rank = 0; rank < kRanks; ++rank)
        numbers.CopyFrom(sent[s][static_cast<size_t>(rank)], mine ? me * count : 0, rank * count,
                         count);
      return numbers;
    };
    for (int round = 0; round < 2; ++round) {
      EBB_RETURN_IF_ERROR(check(c.AllGather(stream, arena.spans(), dtype), "all-gather",
                                [&](size_t s, int64_t n) { return blocks(s, n, false); }));
      EBB_RETURN_IF_ERROR(check(c.ReduceScatter(stream, arena.spans(), dtype, 0.3f),
                                "reduce-scatter",
                                [&](size_t s, int64_t n) { return part(sums[s], me * n, n); }));
      EBB_RETURN_IF_ERROR(check(c.AllReduce(stream, arena.spans(), dtype, ReduceOp::kSum, 0.3f),
                                "all-reduce",
                                [&](size_t s, int64_t n) { return part(sums[s], 0, n); }));
      EBB_RETURN_IF_ERROR(check(c.AllToAll(stream, arena.spans(), dtype), "all-to-all",
                                [&](size_t s, int64_t n) { return blocks(s, n, true); }));
      EBB_RETURN_IF_ERROR(check(c.Broadcast(stream, arena.spans(), dtype, 1), "broadcast",
                                [&](size_t s, int64_t n) { return part(sent[s][1], 0, n); }));
      if (me == 2) {
        EBB_RETURN_IF_ERROR(c.Send(stream, arena.spans(), dtype, 0));
      } else if (me == 0) {
        EBB_RETURN_IF_ERROR(check(c.Receive(stream, arena.spans(), dtype, 2), "receive",
                                  [&](size_t s, int64_t n) { return part(sent[s][2], 0, n); }));
      }
    }
    stream.WaitIdle();
    return c.status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

std::string TestName(const ::testing::TestParamInfo<LargeOperations::ParamType>& test) {
  const auto& [backend, dtype, memory, threads] = test.param;
  return backend.name + "_" + std::string(Name(dtype)) + "_" + ::testing::PrintToString(memory) +
         "_" + std::to_string(threads) + "_threads";
}

INSTANTIATE_TEST_SUITE_P(Backends, LargeOperations,
                         ::testing::Combine(::testing::ValuesIn(ebb::testing::Backends()),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Values(Memory::kBuffers, Memory::kOther,
                                                              Memory::kBuffersOnSomeRanks),
                                            ::testing::Values(1, 2)),
                         TestName);

}  // namespace
}  // namespace ebb
