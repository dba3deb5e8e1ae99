// What every way of connecting ranks must compute and count: all operations against a scalar
// reference, bit for bit. What it must do when something goes wrong is failure_test.cc.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <tuple>
#include <utility>

#include "../device/allocation_counter.h"
#include "backends.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/device.h"
#include "numbers.h"
#include "processes.h"

namespace ebb {
namespace {

using ebb::testing::Backend;
using ebb::testing::Backends;
using ebb::testing::Numbers;
using ebb::testing::ReduceReference;
using ebb::testing::Shared;
using ebb::testing::Signal;

const std::vector<int64_t> kCounts = {515, 0, 1, 77};  // of the spans of one group

// Memory of one operation: each span's send and receive, and what must be in receive afterwards.
struct Operation {
  std::vector<Numbers> send, receive, expected;
  std::vector<CollectiveSpan> spans;

  void Add(int64_t count, Numbers sent, Numbers received, Numbers wanted) {
    send.push_back(std::move(sent));
    receive.push_back(std::move(received));
    expected.push_back(std::move(wanted));
    spans.push_back({.count = count});
  }
  // Once all are added and nothing moves any more.
  std::span<const CollectiveSpan> Spans() {
    for (size_t i = 0; i < spans.size(); ++i) {
      spans[i].send = send[i].at(0);
      spans[i].receive = receive[i].at(0);
    }
    return spans;
  }
  absl::Status Check(const char* what) const {
    for (size_t i = 0; i < expected.size(); ++i) {
      if (receive[i] == expected[i]) continue;
      return absl::InternalError(std::string(what) + ": span " + std::to_string(i) + " is wrong");
    }
    return absl::OkStatus();
  }
};

class CommunicatorConformance
    : public ::testing::TestWithParam<std::tuple<Backend, int, DType, bool>> {
 protected:
  int ranks() const { return std::get<1>(GetParam()); }
  DType dtype() const { return std::get<2>(GetParam()); }
  bool in_place() const { return std::get<3>(GetParam()); }

  const Backend& backend() const { return std::get<0>(GetParam()); }

  // What rank r sends in span s, the same on whichever rank it is computed.
  Numbers Sent(int rank, size_t span, int64_t count) const {
    Numbers numbers(dtype(), count);
    const uint64_t seed = static_cast<uint64_t>(rank) * 1000 + span;
    if (backend().exact_order) {
      numbers.Fill(seed);
    } else {
      numbers.FillWithSmallIntegers(seed);
    }
    return numbers;
  }
  // `wanted`, or one that keeps small integers exact.
  float Scale(float wanted) const { return backend().exact_order ? wanted : 0.25f; }
  bool CanSum() const { return backend().exact_order || dtype() != DType::kInt8; }

  // What every span's reduction must give, of `blocks` times its count.
  std::vector<Numbers> Reduced(int blocks, ReduceOp op, int group, float scale) const {
    std::vector<Numbers> results;
    std::vector<float> inputs(static_cast<size_t>(ranks()));
    for (size_t span = 0; span < kCounts.size(); ++span) {
      std::vector<Numbers> sent;
      for (int rank = 0; rank < ranks(); ++rank)
        sent.push_back(Sent(rank, span, blocks * kCounts[span]));
      Numbers& result = results.emplace_back(dtype(), blocks * kCounts[span]);
      for (int64_t i = 0; i < result.size(); ++i) {
        for (size_t rank = 0; rank < sent.size(); ++rank) inputs[rank] = sent[rank].Get(i);
        result.Set(i, ReduceReference(inputs, op, group, scale));
      }
    }
    return results;
  }

  // Runs `test` on every rank with a communicator and a stream.
  void OnEveryRank(std::function<absl::Status(Communicator&, Stream&)> test,
                   CommunicatorOptions options = {}) {
    const absl::Status status = backend().run(ranks(), [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator(options));
      EBB_ASSIGN_OR_RETURN(Stream stream, backend().device(2).NewStream("comm"));
      EBB_RETURN_IF_ERROR(test(communicator, stream));
      stream.WaitIdle();
      return communicator.status();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
};

TEST_P(CommunicatorConformance, AllGather) {
  OnEveryRank([&](Communicator& communicator, Stream& stream) -> absl::Status {
    Operation operation;
    int64_t bytes = 0;
    for (size_t s = 0; s < kCounts.size(); ++s) {
      const int64_t count = kCounts[s];
      Numbers receive(dtype(), ranks() * count), expected(dtype(), ranks() * count);
      for (int rank = 0; rank < ranks(); ++rank) {
        expected.CopyFrom(Sent(rank, s, count), 0, rank * count, count);
      }
      const Numbers mine = Sent(communicator.rank(), s, count);
      if (in_place()) receive.CopyFrom(mine, 0, communicator.rank() * count, count);
      operation.Add(count, mine, std::move(receive), std::move(expected));
      bytes += (ranks() - 1) * count * SizeOf(dtype());
    }
    operation.Spans();
    if (in_place()) {
      for (size_t s = 0; s < kCounts.size(); ++s) {
        operation.spans[s].send = operation.receive[s].at(communicator.rank() * kCounts[s]);
      }
    }
    EBB_RETURN_IF_ERROR(communicator.AllGather(stream, operation.spans, dtype()));
    stream.WaitIdle();
    if (communicator.bytes_moved() != bytes) return absl::InternalError("bytes_moved");
    return operation.Check("all-gather");
  });
}

TEST_P(CommunicatorConformance, ReduceScatterInEveryGrouping) {
  if (!CanSum()) GTEST_SKIP() << "int8 is not summed";
  for (const int group : {0, 1, 2, 4}) {
    if (group > 0 && ranks() % group != 0) continue;
    const float scale = Scale(1.0f / static_cast<float>(3 * ranks()));
    const std::vector<Numbers> reduced = Reduced(ranks(), ReduceOp::kSum, group, scale);
    OnEveryRank(
        [&](Communicator& communicator, Stream& stream) -> absl::Status {
          Operation operation;
          int64_t bytes = 0;
          for (size_t s = 0; s < kCounts.size(); ++s) {
            const int64_t count = kCounts[s];
            Numbers expected(dtype(), count);
            expected.CopyFrom(reduced[s], communicator.rank() * count, 0, count);
            operation.Add(count, Sent(communicator.rank(), s, ranks() * count),
                          Numbers(dtype(), count), std::move(expected));
            bytes += (ranks() - 1) * count * SizeOf(dtype());
          }
          operation.Spans();
          if (in_place()) {
            for (size_t s = 0; s < kCounts.size(); ++s) {
              operation.spans[s].receive = operation.send[s].at(communicator.rank() * kCounts[s]);
            }
          }
          EBB_RETURN_IF_ERROR(communicator.ReduceScatter(stream, operation.spans, dtype(), scale));
          stream.WaitIdle();
          if (communicator.bytes_moved() != bytes) return absl::InternalError("bytes_moved");
          if (in_place()) {
            for (size_t s = 0; s < kCounts.size(); ++s) {
              operation.receive[s].CopyFrom(operation.send[s], communicator.rank() * kCounts[s], 0,
                                            kCounts[s]);
            }
          }
          return operation.Check("reduce-scatter");
        },
        {.reduction_group = group});
  }
}

TEST_P(CommunicatorConformance, AllReduceOfEveryKind) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
    if (op == ReduceOp::kSum && !CanSum()) continue;
    const float scale = op == ReduceOp::kSum ? Scale(0.7f) : 1.0f;
    const std::vector<Numbers> reduced = Reduced(1, op, 0, scale);
    OnEveryRank([&](Communicator& communicator, Stream& stream) -> absl::Status {
      Operation operation;
      int64_t bytes = 0;
      for (size_t s = 0; s < kCounts.size(); ++s) {
        const int64_t count = kCounts[s];
        const Numbers mine = Sent(communicator.rank(), s, count);
        operation.Add(count, mine, in_place() ? mine : Numbers(dtype(), count), reduced[s]);
        bytes += count * SizeOf(dtype());
      }
      operation.Spans();
      if (in_place()) {
        for (CollectiveSpan& span : operation.spans) span.send = span.receive;
      }
      EBB_RETURN_IF_ERROR(communicator.AllReduce(stream, operation.spans, dtype(), op, scale));
      stream.WaitIdle();
      if (communicator.bytes_moved() != 2 * (ranks() - 1) * bytes / ranks())
        return absl::InternalError("bytes_moved");
      return operation.Check("all-reduce");
    });
  }
}

TEST_P(CommunicatorConformance, BroadcastFromEveryRoot) {
  OnEveryRank([&](Communicator& communicator, Stream& stream) -> absl::Status {
    for (int root = 0; root < std::min(ranks(), 4); ++root) {
      const bool is_root = communicator.rank() == root;
      Operation operation;
      for (size_t s = 0; s < kCounts.size(); ++s) {
        const Numbers sent = Sent(root, s, kCounts[s]);
        operation.Add(kCounts[s], sent, is_root && in_place() ? sent : Numbers(dtype(), kCounts[s]),
                      sent);
      }
      operation.Spans();
      for (size_t s = 0; s < kCounts.size(); ++s) {
        if (!is_root) operation.spans[s].send = nullptr;  // of no use
        if (is_root && in_place()) operation.spans[s].send = operation.spans[s].receive;
      }
      EBB_RETURN_IF_ERROR(communicator.Broadcast(stream, operation.spans, dtype(), root));
      stream.WaitIdle();
      EBB_RETURN_IF_ERROR(operation.Check("broadcast"));
    }
    return absl::OkStatus();
  });
}

TEST_P(CommunicatorConformance, AllToAll) {
  std::vector<std::vector<Numbers>> sent(static_cast<size_t>(ranks()));
  for (int rank = 0; rank < ranks(); ++rank) {
    for (size_t s = 0; s < kCounts.size(); ++s) {
      sent[static_cast<size_t>(rank)].push_back(Sent(rank, s, ranks() * kCounts[s]));
    }
  }
  OnEveryRank([&](Communicator& communicator, Stream& stream) -> absl::Status {
    Operation operation;
    for (size_t s = 0; s < kCounts.size(); ++s) {
      const int64_t count = kCounts[s];
      Numbers expected(dtype(), ranks() * count);
      for (int rank = 0; rank < ranks(); ++rank) {
        expected.CopyFrom(sent[static_cast<size_t>(rank)][s], communicator.rank() * count,
                          rank * count, count);
      }
      operation.Add(count, sent[static_cast<size_t>(communicator.rank())][s],
                    Numbers(dtype(), ranks() * count), std::move(expected));
    }
    EBB_RETURN_IF_ERROR(communicator.AllToAll(stream, operation.Spans(), dtype()));
    stream.WaitIdle();
    return operation.Check("all-to-all");
  });
}

// Every rank sends to the next one round the ring; the even ones send first.
TEST_P(CommunicatorConformance, SendAndReceiveRoundARing) {
  OnEveryRank([&](Communicator& communicator, Stream& stream) -> absl::Status {
    const int rank = communicator.rank();
    if (ranks() == 1) {
      const absl::Status alone = communicator.Send(stream, {}, dtype(), 0);
      return alone.code() == absl::StatusCode::kInvalidArgument ? absl::OkStatus()
                                                                : absl::InternalError("no error");
    }
    const int next = (rank + 1) % ranks(), previous = (rank + ranks() - 1) % ranks();
    Operation operation;
    int64_t bytes = 0;
    for (size_t s = 0; s < kCounts.size(); ++s) {
      operation.Add(kCounts[s], Sent(rank, s, kCounts[s]), Numbers(dtype(), kCounts[s]),
                    Sent(previous, s, kCounts[s]));
      bytes += kCounts[s] * SizeOf(dtype());
    }
    const std::span<const CollectiveSpan> spans = operation.Spans();
    if (rank % 2 == 0) EBB_RETURN_IF_ERROR(communicator.Send(stream, spans, dtype(), next));
    EBB_RETURN_IF_ERROR(communicator.Receive(stream, spans, dtype(), previous));
    if (rank % 2 == 1) EBB_RETURN_IF_ERROR(communicator.Send(stream, spans, dtype(), next));
    stream.WaitIdle();
    if (communicator.bytes_moved() != bytes) return absl::InternalError("bytes_moved");
    return operation.Check("send and receive");
  });
}

std::string TestName(const ::testing::TestParamInfo<CommunicatorConformance::ParamType>& test) {
  const auto& [backend, ranks, dtype, in_place] = test.param;
  return backend.name + "_" + std::to_string(ranks) + "_ranks_" + std::string(Name(dtype)) +
         (in_place ? "_in_place" : "");
}

INSTANTIATE_TEST_SUITE_P(SmallWorlds, CommunicatorConformance,
                         ::testing::Combine(::testing::ValuesIn(Backends()),
                                            ::testing::Values(1, 2, 3, 4, 8),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16,
                                                              DType::kFloat16, DType::kInt8),
                                            ::testing::Bool()),
                         TestName);
std::vector<CommunicatorConformance::ParamType> LargeWorlds() {
  std::vector<CommunicatorConformance::ParamType> worlds;
  for (const Backend& backend : Backends())
    worlds.emplace_back(backend, backend.many_ranks, DType::kBFloat16, true);
  return worlds;
}
INSTANTIATE_TEST_SUITE_P(LargeWorlds, CommunicatorConformance, ::testing::ValuesIn(LargeWorlds()),
                         TestName);

class CommunicatorTest : public ::testing::TestWithParam<Backend> {};

TEST_P(CommunicatorTest, BarrierIsAnOperationInStreamOrder) {
  const Shared<std::atomic<int>> came(0);
  const absl::Status status = GetParam().run(3, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(Stream stream, GetParam().device(1).NewStream("comm"));
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
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(CommunicatorTest, OperationsOfSeveralStreamsRunInTheOrderOfTheCalls) {
  const absl::Status status = GetParam().run(2, [](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    const Device device = GetParam().device(1);
    EBB_ASSIGN_OR_RETURN(Stream first, device.NewStream("first"));
    EBB_ASSIGN_OR_RETURN(Stream second, device.NewStream("second"));
    std::vector<float> values(400, static_cast<float>(world.rank() + 1));
    std::vector<CollectiveSpan> spans(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      spans[i] = {.send = &values[i], .receive = &values[i], .count = 1};
      Stream& stream = i % 2 == static_cast<size_t>(world.rank())
                           ? first
                           : second;  // and not the same on both ranks
      EBB_RETURN_IF_ERROR(communicator.AllReduce(stream, {&spans[i], 1}, DType::kFloat32));
    }
    first.WaitIdle();
    second.WaitIdle();
    EBB_RETURN_IF_ERROR(communicator.status());
    return values == std::vector<float>(400, 3) ? absl::OkStatus()
                                                : absl::InternalError("wrong sums");
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Gathers on one communicator and stream beside reductions on another, as the engine does it.
TEST_P(CommunicatorTest, TwoCommunicatorsWorkBesideEachOther) {
  constexpr int kRanks = 3, kRounds = 100;
  constexpr int64_t kCount = 100;
  const absl::Status status = GetParam().run(kRanks, [](World world) -> absl::Status {
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
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(CommunicatorTest, ExchangesOfDifferentPairsDoNotWaitForEachOther) {
  Signal second_pair_done;
  const absl::Status status = GetParam().run(4, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    Stream stream = GetParam().device(1).CallerStream();
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
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(CommunicatorTest, SplitFormsOneCommunicatorAColourOrderedByKey) {
  const absl::Status status = GetParam().run(6, [](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator all,
                         world.NewCommunicator({.name = "all", .reduction_group = 2}));
    // Colours 0 and 1 of three ranks each, in reverse order.
    EBB_ASSIGN_OR_RETURN(Communicator part, all.Split(world.rank() % 2, -world.rank()));
    if (part.size() != 3 || part.rank() != 2 - world.rank() / 2)
      return absl::InternalError("wrong place");
    Stream stream = GetParam().device(1).CallerStream();
    const float mine = static_cast<float>(world.rank());
    std::array<float, 3> received = {};
    const CollectiveSpan span = {.send = &mine, .receive = received.data(), .count = 1};
    EBB_RETURN_IF_ERROR(part.AllGather(stream, {&span, 1}, DType::kFloat32));
    stream.WaitIdle();
    EBB_RETURN_IF_ERROR(part.status());
    const float colour = static_cast<float>(world.rank() % 2);
    if (received != std::array{4 + colour, 2 + colour, colour})
      return absl::InternalError("wrong order");
    // And a part splits again.
    EBB_ASSIGN_OR_RETURN(Communicator alone, part.Split(part.rank(), 0));
    EBB_RETURN_IF_ERROR(alone.Barrier(stream));
    stream.WaitIdle();
    return alone.size() == 1 ? alone.status() : absl::InternalError("wrong size");
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(CommunicatorTest, OperationsAllocateNothing) {
  const Shared<std::atomic<int64_t>> allocated(-1);
  const absl::Status status = GetParam().run(2, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(Stream stream, GetParam().device(2).NewStream("comm"));
    std::vector<float> send(2000, 1), receive(2000), value(1);
    std::vector<CollectiveSpan> spans(
        3, {.send = send.data(), .receive = receive.data(), .count = 1000});
    const CollectiveSpan pair = {.send = value.data(), .receive = value.data(), .count = 1};
    int64_t before = 0;
    for (int round = 0; round < 20; ++round) {
      if (round == 1) {  // the first may set up threads' own storage
        EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
        stream.WaitIdle();
        before = ebb::testing::Allocations();
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
    if (world.rank() == 0) allocated->store(ebb::testing::Allocations() - before);
    EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
    stream.WaitIdle();
    return communicator.status();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(allocated->load(), 0);
}

TEST_P(CommunicatorTest, ArgumentsThatOneRankCanSeeToBeWrongAreRefusedAtOnce) {
  const absl::Status status = GetParam().run(2, [](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    Stream stream = GetParam().device(1).CallerStream();
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
                               fp32),  // the other's place
        communicator.ReduceScatter(stream, std::array{CollectiveSpan{m, m + 4 * peer, 4}}, fp32),
        communicator.ReduceScatter(stream, std::array{CollectiveSpan{m, m + 16, 4}}, fp32,
                                   1.0f / 0.0f),
        communicator.AllReduce(stream, std::array{CollectiveSpan{m, m + 1, 4}}, fp32),
        communicator.AllToAll(stream, std::array{CollectiveSpan{m, m, 4}}, fp32),
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
    // Nothing has been called, so the communicator still works.
    EBB_RETURN_IF_ERROR(
        communicator.AllGather(stream, std::array{CollectiveSpan{m + 4 * rank, m, 4}}, fp32));
    stream.WaitIdle();
    return communicator.status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorTest, ::testing::ValuesIn(Backends()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ebb
