// Collectives of threads and processes against copies with the same memory traffic, in turns in one
// run. Only the ratio counts, because a machine's load changes from minute to minute.
//
//   build/release/bin/comm_bench
//
// algbw and busbw are those of nccl-tests (doc/PERFORMANCE.md): algbw = bytes of the whole buffer /
// time, busbw = algbw * (N-1)/N. traffic = bytes that the ranks read and write in memory / time.
// of_copy = the copy's time / the collective's, as medians. The same ranks copy as many bytes as
// the collective reads and writes. of_copy_quiet: the same for the faster quartiles, which other
// load disturbs less. An all-gather that is not in place may be faster than its copy, because a
// rank often finds data in a cache that another rank has read.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <utility>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/cpu/copy.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/thread_team.h"
#include "forked_ranks.h"

namespace ebb {
namespace {

constexpr int64_t kSkewBytes =
    69'952;  // arrays at equal offsets in their pages would share cache sets

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

double Quantile(std::vector<double> values, size_t numerator, size_t denominator) {
  const size_t at = values.size() * numerator / denominator;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}
double Median(std::vector<double> values) {
  return Quantile(std::move(values), 1, 2);
}

// One rank's side of a benchmark: its operation, and the copy for comparison.
struct Rank {
  std::function<absl::Status()> collective;
  std::function<void()> copy;
};

// Runs both in turns on all ranks, which begin every turn together. Rank 0 measures the time.
absl::Status TakeTurns(benchmark::State& state, World& world, Communicator& communicator,
                       Stream& stream, const Rank& rank, std::vector<double>& collective_seconds,
                       std::vector<double>& copy_seconds) {
  const auto timed = [&](const std::function<absl::Status()>& run) -> absl::StatusOr<double> {
    EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
    const auto begin = std::chrono::steady_clock::now();
    EBB_RETURN_IF_ERROR(run());
    EBB_RETURN_IF_ERROR(communicator.Barrier(stream));  // the slowest rank ends it
    return Seconds(std::chrono::steady_clock::now() - begin);
  };
  const auto turn = [&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const double collective, timed(rank.collective));
    EBB_ASSIGN_OR_RETURN(const double copy, timed([&] {
                           rank.copy();
                           return absl::OkStatus();
                         }));
    if (world.rank() == 0) {
      collective_seconds.push_back(collective);
      copy_seconds.push_back(copy);
      state.SetIterationTime(collective);
    }
    return communicator.status();
  };
  if (world.rank() == 0) {
    for (auto _ : state) EBB_RETURN_IF_ERROR(turn());
  } else {
    for (benchmark::IterationCount i = 0; i < state.max_iterations; ++i)
      EBB_RETURN_IF_ERROR(turn());
  }
  return absl::OkStatus();
}

enum class Operation { kAllGather, kReduceScatter };

absl::Status Run(bool processes, int ranks, const std::function<absl::Status(World)>& body) {
  return processes ? RunForked(ranks, body) : RunThreads(ranks, body);
}

// range(0): bytes of the whole buffer; range(1): ranks; range(2): in place; range(3): processes.
void Compare(benchmark::State& state, Operation operation, DType dtype) {
  const int64_t bytes = state.range(0);
  const auto ranks = static_cast<int>(state.range(1));
  const bool in_place = state.range(2) != 0;
  const int64_t block = bytes / ranks;
  // The bytes that one rank reads and writes, including its own block if that is not in place.
  const int64_t copied =
      operation == Operation::kAllGather ? (in_place ? bytes - block : bytes) : 0;
  const int64_t traffic = operation == Operation::kAllGather ? 2 * copied : bytes + block;
  std::vector<double> collective_seconds, copy_seconds;
  const absl::Status status = Run(state.range(3) != 0, ranks, [&](World world) -> absl::Status {
    const Device device = Device::Cpu();
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    Stream stream = device.CallerStream();
    const int64_t mine = world.rank() * block;
    EBB_ASSIGN_OR_RETURN(const Buffer whole, device.Allocate(bytes, "the whole buffer"));
    EBB_ASSIGN_OR_RETURN(const Buffer part, device.Allocate(block + kSkewBytes, "a rank's part"));
    EBB_ASSIGN_OR_RETURN(const Buffer source,
                         device.Allocate(traffic / 2 + 2 * kSkewBytes, "the copy's source"));
    EBB_ASSIGN_OR_RETURN(const Buffer destination,
                         device.Allocate(traffic / 2 + 3 * kSkewBytes, "the copy's destination"));
    for (const Buffer* buffer : {&whole, &part, &source, &destination}) {
      std::fill(buffer->span().begin(), buffer->span().end(), std::byte{0});
    }
    CollectiveSpan span = {.count = block / SizeOf(dtype)};
    if (operation == Operation::kAllGather) {
      span.send = in_place ? whole.data() + mine : part.data() + kSkewBytes;
      span.receive = whole.data();
    } else {
      span.send = whole.data();
      span.receive = in_place ? whole.data() + mine : part.data() + kSkewBytes;
    }
    const Rank rank = {.collective =
                           [&] {
                             return operation == Operation::kAllGather
                                        ? communicator.AllGather(stream, {&span, 1}, dtype)
                                        : communicator.ReduceScatter(stream, {&span, 1}, dtype,
                                                                     0.5f);
                           },
                       .copy =
                           [&] {
                             CopyBytes(stream.team(), destination.data() + 3 * kSkewBytes,
                                       source.data() + 2 * kSkewBytes, traffic / 2);
                           }};
    return TakeTurns(state, world, communicator, stream, rank, collective_seconds, copy_seconds);
  });
  if (!status.ok()) return state.SkipWithError(std::string(status.message()).c_str());
  const double seconds = Median(collective_seconds);
  state.counters["algbw_GB/s"] = static_cast<double>(bytes) / seconds / 1e9;
  state.counters["busbw_GB/s"] = static_cast<double>(bytes - block) / seconds / 1e9;
  state.counters["traffic_GB/s"] = static_cast<double>(ranks * traffic) / seconds / 1e9;
  state.counters["of_copy"] = Median(copy_seconds) / seconds;
  state.counters["of_copy_quiet"] =
      Quantile(copy_seconds, 1, 4) / Quantile(collective_seconds, 1, 4);
}

void AllGather(benchmark::State& state) {
  Compare(state, Operation::kAllGather, DType::kFloat32);
}
void ReduceScatterFp32(benchmark::State& state) {
  Compare(state, Operation::kReduceScatter, DType::kFloat32);
}
void ReduceScatterBf16(benchmark::State& state) {
  Compare(state, Operation::kReduceScatter, DType::kBFloat16);
}
void ReduceScatterFp16(benchmark::State& state) {
  Compare(state, Operation::kReduceScatter, DType::kFloat16);
}

void Sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"bytes", "ranks", "in_place", "processes"})
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
  for (const int64_t mebibytes : {4, 64}) {
    for (const int64_t in_place : {0, 1}) {
      for (const int64_t processes : {0, 1})
        benchmark->Args({mebibytes << 20, 2, in_place, processes});
    }
  }
}
BENCHMARK(AllGather)->Apply(Sizes);
BENCHMARK(ReduceScatterFp32)->Apply(Sizes);
BENCHMARK(ReduceScatterBf16)->Apply(Sizes);
BENCHMARK(ReduceScatterFp16)->Apply(Sizes);

// The time of one small operation that all ranks begin at once. range(0): ranks, each on a stream
// of its own; range(1): processes.
void SmallAllReduce(benchmark::State& state) {
  const absl::Status status =
      Run(state.range(1) != 0, static_cast<int>(state.range(0)), [&](World world) -> absl::Status {
        EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
        EBB_ASSIGN_OR_RETURN(Stream stream, Device::Cpu().NewStream("comm"));
        float value = 1;
        const CollectiveSpan span = {.send = &value, .receive = &value, .count = 1};
        const auto operation = [&] {
          return communicator.AllReduce(stream, {&span, 1}, DType::kFloat32, ReduceOp::kMax);
        };
        if (world.rank() == 0) {
          for (auto _ : state) EBB_RETURN_IF_ERROR(operation());
          stream.WaitIdle();
        } else {
          for (benchmark::IterationCount i = 0; i < state.max_iterations; ++i)
            EBB_RETURN_IF_ERROR(operation());
          stream.WaitIdle();
        }
        return communicator.status();
      });
  if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
}
BENCHMARK(SmallAllReduce)
    ->ArgNames({"ranks", "processes"})
    ->Args({2, 0})
    ->Args({2, 1})
    ->Args({4, 0})
    ->Args({4, 1})
    ->Args({16, 0})
    ->Args({16, 1})
    ->Args({64, 0})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace ebb

BENCHMARK_MAIN();
