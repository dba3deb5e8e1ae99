// Ranks that make different calls on a communicator: every rank learns which rank called what.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <ostream>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "failing_ranks.h"
#include "tests/status.h"

namespace ebb::testing::mismatch_test {
namespace {

using ::testing::Each;

constexpr DType kType = DType::kFloat32;

// The calls of two ranks, and the expected message.
struct Mismatch {
  std::string name;
  std::function<absl::Status(Communicator&, Stream&, std::span<const CollectiveSpan>)> first,
      second;
  std::string first_text, second_text;
};
void PrintTo(const Mismatch& mismatch, std::ostream* out) {
  *out << mismatch.name;
}

std::vector<Mismatch> Mismatches() {
  using Spans = std::span<const CollectiveSpan>;
  const auto gather = [](Communicator& c, Stream& s, Spans spans) {
    return c.AllGather(s, spans, kType);
  };
  const auto reduce = [](Communicator& c, Stream& s, Spans spans) {
    return c.AllReduce(s, spans, kType);
  };
  const auto send = [](Communicator& c, Stream& s, Spans spans) {
    return c.Send(s, spans, kType, 1 - c.rank());
  };
  const auto receive = [](Communicator& c, Stream& s, Spans spans) {
    return c.Receive(s, spans, kType, 1 - c.rank());
  };
  const std::string gathered = "all-gather of 2 spans, 5 fp32 elements",
                    reduced = "all-reduce of 2 spans, 5 fp32 elements";
  return {
      {"kind", gather, reduce, gathered, reduced},
      {"dtype", gather,
       [](Communicator& c, Stream& s, Spans spans) { return c.AllGather(s, spans, DType::kInt8); },
       gathered, "all-gather of 2 spans, 5 int8 elements"},
      {"spans", gather,
       [&](Communicator& c, Stream& s, Spans spans) {
         return c.AllGather(s, spans.first(1), kType);
       },
       gathered, "all-gather of 1 span, 3 fp32 elements"},
      {"counts", gather,
       [](Communicator& c, Stream& s, Spans spans) {
         std::array swapped = {spans[1], spans[0]};
         return c.AllGather(s, swapped, kType);
       },
       gathered, "span 0 has 3 elements on rank 0 and 2 on rank 1"},
      {"op", reduce,
       [](Communicator& c, Stream& s, Spans spans) {
         return c.AllReduce(s, spans, kType, ReduceOp::kMax);
       },
       reduced, reduced + ", maximum"},
      {"scale", reduce,
       [](Communicator& c, Stream& s, Spans spans) {
         return c.AllReduce(s, spans, kType, ReduceOp::kSum, 0.5f);
       },
       reduced, reduced + ", scale 0.5"},
      {"root",
       [](Communicator& c, Stream& s, Spans spans) { return c.Broadcast(s, spans, kType, 0); },
       [](Communicator& c, Stream& s, Spans spans) { return c.Broadcast(s, spans, kType, 1); },
       "root 0", "root 1"},
      {"both_send", send, send, "send of 2 spans, 5 fp32 elements, to 1",
       "send of 2 spans, 5 fp32 elements, to 0"},
      {"exchange_counts", send,
       [](Communicator& c, Stream& s, Spans spans) {
         return c.Receive(s, spans.first(1), kType, 0);
       },
       "send of 2 spans, 5 fp32 elements, to 1", "receive of 1 span, 3 fp32 elements, from 0"},
      {"send_and_collective", send, gather, "send of 2 spans, 5 fp32 elements, to 1", gathered},
      {"collective_and_receive", reduce, receive, reduced,
       "receive of 2 spans, 5 fp32 elements, from 0"},
  };
}

class MismatchTest : public ::testing::TestWithParam<std::tuple<Backend, Mismatch>> {};

TEST_P(MismatchTest, EveryRankGetsBothCalls) {
  const auto& [backend, mismatch] = GetParam();
  for (int round = 0; round < 20; ++round) {
    Results seen;
    const absl::Status run =
        backend.run(2, [&, &backend = backend, &mismatch = mismatch](World world) -> absl::Status {
          EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
          std::array<float, 32> send = {}, receive = {};
          const std::array spans = {CollectiveSpan{send.data(), receive.data(), 3},
                                    CollectiveSpan{send.data() + 8, receive.data() + 8, 2}};
          const absl::Status status = After(backend, communicator, [&](Stream& s) {
            return world.rank() == 0 ? mismatch.first(communicator, s, spans)
                                     : mismatch.second(communicator, s, spans);
          });
          EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
          seen.Set(world.rank(), status);
          return absl::OkStatus();
        });
    EXPECT_TRUE(run.ok()) << run;
    EXPECT_EQ(seen.Get(0), seen.Get(1));
    EXPECT_THAT(seen.Get(0), Says("rank 0", "rank 1", mismatch.first_text, mismatch.second_text));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, MismatchTest,
                         ::testing::Combine(::testing::ValuesIn(Backends()),
                                            ::testing::ValuesIn(Mismatches())),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + "_" + std::get<1>(test.param).name;
                         });

class MismatchAmongManyTest : public FailingRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, MismatchAmongManyTest, ::testing::ValuesIn(Backends()), NameOf);

TEST_P(MismatchAmongManyTest, TheRankThatDiffersIsNamed) {
  const auto seen = Seen(5, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "reduce"}));
    std::array<float, 8> values = {};
    const CollectiveSpan span = {
        .send = values.data(), .receive = values.data(), .count = world.rank() == 3 ? 8 : 4};
    return After(communicator, [&](Stream& s) {
      return communicator.AllReduce(s, {&span, 1}, kType);
    });
  });
  EXPECT_THAT(seen, Each(Says("'reduce'", "4 elements on rank 0 and 8 on rank 3")));
}

}  // namespace
}  // namespace ebb::testing::mismatch_test
