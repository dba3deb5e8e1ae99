// Threads that share a GPU: their sums have the bits of the CPU's `local` communicator, on device
// memory. This file is part of two programs. One of them uses the real CUDA runtime, and skips its
// tests without a device.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../comm/numbers.h"
#include "../print_dtype.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"

namespace ebb {
namespace {

using ebb::testing::Numbers;

constexpr int64_t kCounts[] = {4099, 0, 1, 640};  // the spans' counts in one operation

// One rank's spans in device memory: the one that it sends, and the one that it receives into.
class Arrays {
 public:
  static absl::StatusOr<Arrays> Create(const Device& device, Stream& stream, int rank, DType dtype,
                                       int64_t send_blocks, int64_t receive_blocks) {
    Arrays arrays;
    for (size_t s = 0; s < std::size(kCounts); ++s) {
      Numbers sent(dtype, send_blocks * kCounts[s]);
      sent.Fill(static_cast<uint64_t>(rank) * 100 + s);
      Numbers received(dtype, receive_blocks * kCounts[s]);
      // The last one is not aligned.
      const int64_t gap = s + 1 == std::size(kCounts) ? SizeOf(dtype) : 0;
      EBB_ASSIGN_OR_RETURN(Buffer from, device.Allocate(gap + Bytes(sent) + 1, "sent"));
      EBB_ASSIGN_OR_RETURN(Buffer to, device.Allocate(gap + Bytes(received) + 1, "received"));
      stream.Copy(from.data() + gap, sent.at(0), Bytes(sent));
      stream.Copy(to.data() + gap, received.at(0), Bytes(received));
      arrays.spans_.push_back(
          {.send = from.data() + gap, .receive = to.data() + gap, .count = kCounts[s]});
      arrays.buffers_.push_back(std::move(from));
      arrays.buffers_.push_back(std::move(to));
      stream.WaitIdle();
      arrays.received_.push_back(std::move(received));
    }
    return arrays;
  }

  std::span<const CollectiveSpan> spans() const { return spans_; }
  // The spans' contents when the stream comes to this point.
  std::vector<Numbers> Read(Stream& stream) {
    for (size_t s = 0; s < spans_.size(); ++s)
      stream.Copy(received_[s].at(0), spans_[s].receive, Bytes(received_[s]));
    stream.WaitIdle();
    return received_;
  }

 private:
  static int64_t Bytes(const Numbers& numbers) { return numbers.size() * SizeOf(numbers.dtype()); }

  std::vector<Buffer> buffers_;
  std::vector<CollectiveSpan> spans_;
  std::vector<Numbers> received_;
};

// One rank's memory after each operation, one after the other.
absl::StatusOr<std::vector<Numbers>> RunAll(World& world, const Device& device, DType dtype,
                                            int group) {
  EBB_ASSIGN_OR_RETURN(Communicator communicator,
                       world.NewCommunicator({.reduction_group = group}));
  EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
  const int rank = world.rank(), size = world.size();
  std::vector<Numbers> results;
  const auto run = [&](int64_t send_blocks, int64_t receive_blocks,
                       auto operation) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Arrays arrays,
                         Arrays::Create(device, stream, rank, dtype, send_blocks, receive_blocks));
    EBB_RETURN_IF_ERROR(operation(arrays.spans()));
    for (Numbers& numbers : arrays.Read(stream)) results.push_back(std::move(numbers));
    return communicator.status();
  };
  using Spans = std::span<const CollectiveSpan>;
  EBB_RETURN_IF_ERROR(
      run(1, size, [&](Spans spans) { return communicator.AllGather(stream, spans, dtype); }));
  EBB_RETURN_IF_ERROR(run(size, 1, [&](Spans spans) {
    return communicator.ReduceScatter(stream, spans, dtype, 0.3f);
  }));
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
    EBB_RETURN_IF_ERROR(run(1, 1, [&](Spans spans) {
      return communicator.AllReduce(stream, spans, dtype, op, op == ReduceOp::kSum ? 0.7f : 1);
    }));
  }
  EBB_RETURN_IF_ERROR(run(
      1, 1, [&](Spans spans) { return communicator.Broadcast(stream, spans, dtype, size - 1); }));
  EBB_RETURN_IF_ERROR(
      run(size, size, [&](Spans spans) { return communicator.AllToAll(stream, spans, dtype); }));
  if (size % 2 == 0) {
    EBB_RETURN_IF_ERROR(run(1, 1, [&](Spans spans) {
      return rank % 2 == 0 ? communicator.Send(stream, spans, dtype, rank + 1)
                           : communicator.Receive(stream, spans, dtype, rank - 1);
    }));
  }
  return results;
}

class SharedDeviceTest : public ::testing::TestWithParam<std::tuple<int, int, DType>> {
 protected:
  void SetUp() override {
    const auto device = Device::Cuda();
    if (!device.ok()) GTEST_SKIP() << device.status();
  }
};

TEST_P(SharedDeviceTest, EveryOperationGivesTheBitsOfTheCpus) {
  const auto& [ranks, group, dtype] = GetParam();
  const auto results_on = [&, ranks = ranks, group = group, dtype = dtype](const char* name) {
    std::vector<std::vector<Numbers>> results(static_cast<size_t>(ranks));
    const absl::Status status = RunThreads(ranks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Device device, Device::FromName(name));
      EBB_ASSIGN_OR_RETURN(World on_device, world.On(device));
      EBB_ASSIGN_OR_RETURN(results[static_cast<size_t>(world.rank())],
                           RunAll(on_device, device, dtype, group));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << name << ": " << status;
    return results;
  };
  EXPECT_TRUE(results_on("cuda:0") == results_on("cpu"));
}

std::vector<std::tuple<int, int, DType>> Worlds() {
  std::vector<std::tuple<int, int, DType>> worlds;
  for (const auto& [ranks, group] :
       {std::pair{1, 0}, {2, 0}, {2, 1}, {3, 0}, {4, 0}, {4, 2}, {5, 0}, {6, 3}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8})
      worlds.emplace_back(ranks, group, dtype);
  }
  return worlds;
}
std::string TestName(const ::testing::TestParamInfo<SharedDeviceTest::ParamType>& test) {
  const auto& [ranks, group, dtype] = test.param;
  return std::to_string(ranks) + "_ranks_group_" + std::to_string(group) + "_" +
         std::string(Name(dtype));
}
INSTANTIATE_TEST_SUITE_P(Worlds, SharedDeviceTest, ::testing::ValuesIn(Worlds()), TestName);

}  // namespace
}  // namespace ebb
