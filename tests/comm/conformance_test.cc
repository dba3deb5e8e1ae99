// Results and counts of every way of connecting ranks: all operations against a scalar reference,
// bit for bit. communicator_test.cc checks the order in which operations run, failure_test.cc what
// happens after a failure.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "backends.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/device.h"
#include "numbers.h"

namespace ebb::testing::conformance_test {
namespace {

const std::vector<int64_t> kCounts = {515, 0, 1, 77};  // of the spans of one group

// Memory of one operation: each span's send and receive, and the expected contents of receive.
struct Operation {
  std::vector<Numbers> send, receive, expected;
  std::vector<CollectiveSpan> spans;

  void Add(int64_t count, Numbers sent, Numbers received, Numbers wanted) {
    send.push_back(std::move(sent));
    receive.push_back(std::move(received));
    expected.push_back(std::move(wanted));
    spans.push_back({.count = count});
  }
  // Call it once all are added, when nothing moves any more.
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

  // The numbers that rank r sends in span s; every rank computes the same.
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
  bool CanSum() const { return backend().exact_order || dtype() != DType::kInt8; }

  // The result of every span's reduction, of `blocks` times its count.
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
      const Device device = backend().device(2);
      EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
      EBB_ASSIGN_OR_RETURN(const Buffer scratch,
                           device.Allocate(backend().sum_scratch, "sums in order"));
      if (scratch.bytes() > 0) EBB_RETURN_IF_ERROR(communicator.SumInOrder(scratch.span()));
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
    if (communicator.bytes_enqueued() != bytes) return absl::InternalError("bytes_enqueued");
    return operation.Check("all-gather");
  });
}

TEST_P(CommunicatorConformance, ReduceScatterInEveryGrouping) {
  if (!CanSum()) GTEST_SKIP() << "int8 is not summed";
  for (const int group : {0, 1, 2, 4}) {
    if (group > 0 && ranks() % group != 0) continue;
    const float scale = 1.0f / static_cast<float>(3 * ranks());
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
          if (communicator.bytes_enqueued() != bytes) return absl::InternalError("bytes_enqueued");
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
    const float scale = op == ReduceOp::kSum ? 0.7f : 1.0f;
    const std::vector<Numbers> reduced = Reduced(1, op, 0, scale);
    OnEveryRank([&](Communicator& communicator, Stream& stream) -> absl::Status {
      Operation operation;
      int64_t bytes = 0;
      for (size_t s = 0; s < kCounts.size(); ++s) {
        const int64_t count = kCounts[s];
        const Numbers mine = Sent(communicator.rank(), s, count);
        const bool stays = ranks() == 1 && in_place() && scale == 1;  // also NaNs
        operation.Add(count, mine, in_place() ? mine : Numbers(dtype(), count),
                      stays ? mine : reduced[s]);
        bytes += count * SizeOf(dtype());
      }
      operation.Spans();
      if (in_place()) {
        for (CollectiveSpan& span : operation.spans) span.send = span.receive;
      }
      EBB_RETURN_IF_ERROR(communicator.AllReduce(stream, operation.spans, dtype(), op, scale));
      stream.WaitIdle();
      if (communicator.bytes_enqueued() != 2 * (ranks() - 1) * bytes / ranks())
        return absl::InternalError("bytes_enqueued");
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
        if (!is_root) operation.spans[s].send = nullptr;  // not used
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

// Ranks send each other parts of different lengths, and nothing where the sum of their numbers is
// divisible by three. A rank has no memory of the spans of others.
TEST_P(CommunicatorConformance, AllToAllV) {
  OnEveryRank([&](Communicator& communicator, Stream& stream) -> absl::Status {
    const int rank = communicator.rank();
    Operation operation;
    std::vector<std::pair<int, int>> pairs;
    int64_t received = 0;
    for (int from = 0; from < ranks(); ++from) {
      for (int to = 0; to < ranks(); ++to) {
        for (size_t s = 0; s < kCounts.size() && (from + to) % 3 != 0; ++s) {
          const int64_t count = kCounts[(s + static_cast<size_t>(from)) % kCounts.size()];
          const Numbers sent = Sent(from, s, count);
          const Numbers nothing(dtype(), count);
          operation.Add(count, from == rank ? sent : nothing, nothing, to == rank ? sent : nothing);
          pairs.emplace_back(from, to);
          if (to == rank && from != rank) received += count * SizeOf(dtype());
        }
      }
    }
    operation.Spans();
    for (size_t s = 0; s < pairs.size(); ++s) {
      CollectiveSpan& span = operation.spans[s];
      std::tie(span.from, span.to) = pairs[s];
      if (span.from != rank) span.send = nullptr;
      if (span.to != rank) span.receive = nullptr;
    }
    const int64_t before = communicator.bytes_enqueued();
    EBB_RETURN_IF_ERROR(communicator.AllToAllV(stream, operation.spans, dtype()));
    stream.WaitIdle();
    if (communicator.bytes_enqueued() - before != received)
      return absl::InternalError("bytes_enqueued");
    return operation.Check("all-to-all-v");
  });
}

// Every rank sends to the next one in a ring. Even ranks send first.
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
    if (communicator.bytes_enqueued() != bytes) return absl::InternalError("bytes_enqueued");
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

}  // namespace
}  // namespace ebb::testing::conformance_test
