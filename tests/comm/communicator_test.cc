// Rules for streams and communicators of every way of connecting ranks: the order in which
// operations run, which calls wait and which do not, what a split makes, and that nothing is
// allocated.
#include "ebb/runtime/comm/communicator.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../device/allocation_counter.h"
#include "backends.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/device.h"
#include "processes.h"

namespace ebb::testing::communicator_test {
namespace {

class CommunicatorTest : public OnEveryBackend {};

TEST_P(CommunicatorTest, BarrierIsAnOperationInStreamOrder) {
  const Shared<std::atomic<int>> came(0);
  Run(3, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(Stream stream, NewStream());
    for (int round = 1; round <= 100; ++round) {
      bool all_came = false;
      stream.Enqueue([&] { came->fetch_add(1); });
      EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
      stream.Enqueue([&] { all_came = came->load() >= 3 * round; });
      EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
      stream.WaitIdle();
      if (!all_came) return absl::InternalError("a rank passed the barrier alone");
    }
    return communicator.status();
  });
}

TEST_P(CommunicatorTest, RanksMeetOnTheHost) {
  const Shared<std::atomic<int>> came(0);
  Run(3, [&](World world) -> absl::Status {
    for (int round = 1; round <= 20; ++round) {
      came->fetch_add(1);
      EBB_RETURN_IF_ERROR(world.MeetOnHost({.name = "halt"}));
      if (came->load() < 3 * round) return absl::InternalError("a rank went on alone");
    }
    return absl::OkStatus();
  });
}

// A NaN keeps its payload, which a sum would drop, so nothing has touched it.
TEST_P(CommunicatorTest, OneRankInPlaceIsOnlyScaled) {
  Run(1, [](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(Stream stream, NewStream());
    constexpr uint32_t kNanWithPayload = 0x7fc12345;
    std::array<float, 3> values = {1.5f, -0.0f, std::bit_cast<float>(kNanWithPayload)};
    const CollectiveSpan span = {.send = values.data(), .receive = values.data(), .count = 3};
    const std::array<float, 3> before = values;
    EBB_RETURN_IF_ERROR(communicator.ReduceScatter(stream, {&span, 1}, DType::kFloat32));
    EBB_RETURN_IF_ERROR(communicator.AllReduce(stream, {&span, 1}, DType::kFloat32));
    EBB_RETURN_IF_ERROR(communicator.AllGather(stream, {&span, 1}, DType::kFloat32));
    stream.WaitIdle();
    if (std::memcmp(values.data(), before.data(), sizeof(values)) != 0)
      return absl::InternalError("values have changed");
    EBB_RETURN_IF_ERROR(communicator.ReduceScatter(stream, {&span, 1}, DType::kFloat32, 0.5f));
    stream.WaitIdle();
    if (values[0] != 0.75f) return absl::InternalError("the sum was not scaled");
    return communicator.status();
  });
}

TEST_P(CommunicatorTest, OperationsOfSeveralStreamsRunInTheOrderOfTheCalls) {
  Run(2, [](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    const Device device = GetParam().device(1);
    EBB_ASSIGN_OR_RETURN(Stream first, device.NewStream("first"));
    EBB_ASSIGN_OR_RETURN(Stream second, device.NewStream("second"));
    std::vector<float> values(400, static_cast<float>(world.rank() + 1));
    std::vector<CollectiveSpan> spans(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      spans[i] = {.send = &values[i], .receive = &values[i], .count = 1};
      Stream& stream =
          i % 2 == static_cast<size_t>(world.rank()) ? first : second;  // different on both ranks
      EBB_RETURN_IF_ERROR(communicator.AllReduce(stream, {&spans[i], 1}, DType::kFloat32));
    }
    first.WaitIdle();
    second.WaitIdle();
    EBB_RETURN_IF_ERROR(communicator.status());
    return values == std::vector<float>(400, 3) ? absl::OkStatus()
                                                : absl::InternalError("wrong sums");
  });
}

// Gathers on one communicator and stream beside reductions on another, as in the engine.
TEST_P(CommunicatorTest, TwoCommunicatorsWorkBesideEachOther) {
  constexpr int kRanks = 3, kRounds = 100;
  constexpr int64_t kCount = 100;
  Run(kRanks, [](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator gathers, world.NewCommunicator({.name = "gather"}));
    EBB_ASSIGN_OR_RETURN(Communicator reductions, world.NewCommunicator({.name = "reduce"}));
    const Device device = GetParam().device(1);
    EBB_ASSIGN_OR_RETURN(Stream gather_stream, device.NewStream("gather"));
    EBB_ASSIGN_OR_RETURN(Stream reduce_stream, device.NewStream("reduce"));
    std::vector<float> mine(kCount, static_cast<float>(world.rank())), all(kRanks * kCount, -1),
        sums(kCount, -1);
    const CollectiveSpan gather = {.send = mine.data(), .receive = all.data(), .count = kCount};
    const CollectiveSpan reduce = {.send = mine.data(), .receive = sums.data(), .count = kCount};
    for (int round = 0; round < kRounds; ++round) {
      EBB_RETURN_IF_ERROR(gathers.AllGather(gather_stream, {&gather, 1}, DType::kFloat32));
      EBB_RETURN_IF_ERROR(reductions.AllReduce(reduce_stream, {&reduce, 1}, DType::kFloat32));
    }
    gather_stream.WaitIdle();
    reduce_stream.WaitIdle();
    EBB_RETURN_IF_ERROR(gathers.status());
    EBB_RETURN_IF_ERROR(reductions.status());
    const bool right = all[0] == 0 && all[kCount] == 1 && all[2 * kCount] == 2 &&
                       sums == std::vector<float>(kCount, 3);
    return right ? absl::OkStatus() : absl::InternalError("wrong numbers");
  });
}

TEST_P(CommunicatorTest, ExchangesOfDifferentPairsDoNotWaitForEachOther) {
  Signal second_pair_done;
  Run(4, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    Stream stream = CallerStream();
    float value = static_cast<float>(world.rank());
    const CollectiveSpan span = {.send = &value, .receive = &value, .count = 1};
    switch (world.rank()) {
      case 0:
        EBB_RETURN_IF_ERROR(communicator.Send(stream, {&span, 1}, DType::kFloat32, 1));
        break;
      case 1:  // only after the others have finished
        second_pair_done.Wait();
        EBB_RETURN_IF_ERROR(communicator.Receive(stream, {&span, 1}, DType::kFloat32, 0));
        break;
      case 2:
        EBB_RETURN_IF_ERROR(communicator.Send(stream, {&span, 1}, DType::kFloat32, 3));
        break;
      case 3:
        EBB_RETURN_IF_ERROR(communicator.Receive(stream, {&span, 1}, DType::kFloat32, 2));
        stream.WaitIdle();
        second_pair_done.Set();
        break;
    }
    stream.WaitIdle();
    EBB_RETURN_IF_ERROR(communicator.status());
    return value == static_cast<float>(world.rank() / 2 * 2) ? absl::OkStatus()
                                                             : absl::InternalError("wrong value");
  });
}

TEST_P(CommunicatorTest, OperationsAllocateNothing) {
  const Shared<std::atomic<int64_t>> allocated(-1);
  Run(2, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(Stream stream, GetParam().device(2).NewStream("comm"));
    std::vector<float> send(2000, 1), receive(2000), value(1);
    std::vector<CollectiveSpan> spans(
        3, {.send = send.data(), .receive = receive.data(), .count = 1000});
    const CollectiveSpan pair = {.send = value.data(), .receive = value.data(), .count = 1};
    int64_t before = 0;
    for (int round = 0; round < 20; ++round) {
      if (round == 1) {  // the first round may set up thread-local storage
        EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
        stream.WaitIdle();
        before = Allocations();
        EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
      }
      EBB_RETURN_IF_ERROR(communicator.AllGather(stream, spans, DType::kFloat32));
      EBB_RETURN_IF_ERROR(communicator.ReduceScatter(stream, spans, DType::kFloat32));
      EBB_RETURN_IF_ERROR(communicator.AllReduce(stream, spans, DType::kFloat32));
      EBB_RETURN_IF_ERROR(communicator.AllToAll(stream, spans, DType::kFloat32));
      EBB_RETURN_IF_ERROR(communicator.Broadcast(stream, spans, DType::kFloat32, 1));
      EBB_RETURN_IF_ERROR(world.rank() == 0
                              ? communicator.Send(stream, {&pair, 1}, DType::kFloat32, 1)
                              : communicator.Receive(stream, {&pair, 1}, DType::kFloat32, 0));
      stream.WaitIdle();
    }
    EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
    stream.WaitIdle();
    if (world.rank() == 0) allocated->store(Allocations() - before);
    EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
    stream.WaitIdle();
    return communicator.status();
  });
  EXPECT_EQ(allocated->load(), 0);
}

TEST_P(CommunicatorTest, ArgumentsThatOneRankSeesToBeWrongAreRefusedAtOnce) {
  Run(2, [](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    Stream stream = CallerStream();
    std::array<float, 64> memory = {};
    float* const m = memory.data();
    const DType fp32 = DType::kFloat32;
    const int rank = world.rank(), peer = 1 - rank;
    const std::vector<absl::Status> refused = {
        communicator.AllGather(stream, std::array{CollectiveSpan{m, m + 16, -1}}, fp32),
        communicator.AllGather(stream, std::array{CollectiveSpan{m, m + 16, INT64_MAX / 4}}, fp32),
        communicator.AllGather(stream, std::array{CollectiveSpan{nullptr, m, 4}}, fp32),
        communicator.AllGather(stream, std::array{CollectiveSpan{m, nullptr, 4}}, fp32),
        communicator.AllGather(stream, std::array{CollectiveSpan{m + 4 * peer, m, 4}},
                               fp32),  // the other rank's place
        communicator.ReduceScatter(stream, std::array{CollectiveSpan{m, m + 4 * peer, 4}}, fp32),
        communicator.ReduceScatter(stream, std::array{CollectiveSpan{m, m + 16, 4}}, fp32,
                                   1.0f / 0.0f),
        communicator.AllReduce(stream, std::array{CollectiveSpan{m, m + 1, 4}}, fp32),
        communicator.AllToAll(stream, std::array{CollectiveSpan{m, m, 4}}, fp32),
        communicator.AllToAllV(stream, std::array{CollectiveSpan{m, m + 16, 4}}, fp32),
        communicator.AllToAllV(stream, std::array{CollectiveSpan{m, m + 16, 4, 0, 2}}, fp32),
        communicator.AllToAllV(stream, std::array{CollectiveSpan{nullptr, m + 16, 4, rank, peer}},
                               fp32),
        communicator.AllToAllV(stream, std::array{CollectiveSpan{m, m + 2, 4, rank, rank}}, fp32),
        communicator.AllToAllV(
            stream,
            std::array{CollectiveSpan{m, m + 16, 4, 1, 0}, CollectiveSpan{m, m + 16, 4, 0, 1}},
            fp32),
        communicator.Broadcast(stream, std::array{CollectiveSpan{m, m, 4}}, fp32, 2),
        communicator.Broadcast(stream, std::array{CollectiveSpan{m, m, 4}}, fp32, -1),
        communicator.Send(stream, std::array{CollectiveSpan{m, nullptr, 4}}, fp32, rank),
        communicator.Receive(stream, std::array{CollectiveSpan{m, nullptr, 4}}, fp32, peer),
    };
    for (size_t i = 0; i < refused.size(); ++i) {
      if (refused[i].code() != absl::StatusCode::kInvalidArgument) {
        return absl::InternalError("case " + std::to_string(i) + " was not refused");
      }
    }
    // No rank has called anything, so the communicator still works.
    EBB_RETURN_IF_ERROR(
        communicator.AllGather(stream, std::array{CollectiveSpan{m + 4 * rank, m, 4}}, fp32));
    stream.WaitIdle();
    return communicator.status();
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorTest, ::testing::ValuesIn(Backends()), NameOf);

}  // namespace
}  // namespace ebb::testing::communicator_test
