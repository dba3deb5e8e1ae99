// The search for micro-batches and rounds of a given batch.
#include "ebb/runtime/planner/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ebb/runtime/planner/answer_table.h"
#include "ebb/runtime/planner/model_shape.h"
#include "ebb/runtime/planner/named_machines.h"
#include "ebb/runtime/planner/offers.h"
#include "ebb/runtime/planner/trials.h"
#include "tests/status.h"

namespace ebb::planner::batch_test {
namespace {

using ::testing::HasSubstr;

Question QuestionOf(const char* model, const char* machine, int ranks, int64_t sequences) {
  Question question{.model = ModelOf(*ShapeOfName(model)),
                    .machine = *MachineOfName(machine),
                    .ranks = ranks,
                    .config = {},
                    .pass = {.context = 2048},
                    .sequences = sequences};
  Config& config = question.config;
  config.compute = DType::kBFloat16;
  config.micro_batch_size = config.gradient_accumulation_steps = 1;
  config.zero.offload_param.max_in_cpu = 0;
  config.zero.prefetch_bucket_size = 2 * question.model.largest_unit();
  config.zero.max_live_parameters = 4 * question.model.largest_unit();
  return question;
}

constexpr Choice kOnNvme{.stage = 3,
                         .parameters = Tier::kNvme,
                         .states = Tier::kNvme,
                         .boundaries = Tier::kCpu,
                         .recompute = true};

int64_t SequencesOf(const Config& config) {
  return config.micro_batch_size * config.gradient_accumulation_steps;
}

TEST(Batch, EveryAnswerHasTheWholeBatch) {
  const Question question = QuestionOf("gpt2-xl", "rtx4090-64gb", 1, 24);
  for (const Answer& answer : AnswerAll(question)) {
    EXPECT_EQ(SequencesOf(answer.config), 24);
    EXPECT_OK(answer.refused);
  }
}

// No other cut into micro-batches and rounds is faster by more than a little.
TEST(Batch, TheCutIsTheFastest) {
  const Question question = QuestionOf("gpt2-xl", "rtx4090-64gb", 1, 8);
  const Choice kChoices[] = {
      {.stage = 1, .states = Tier::kCpu, .recompute = true},
      {.stage = 3, .parameters = Tier::kCpu, .states = Tier::kNvme, .recompute = true}};
  for (const Choice& choice : kChoices) {
    const Answer found = AnswerForBatch(question, choice, Depth::kTime);
    ASSERT_TRUE(found.time) << found.lacks();
    double most = 0;
    for (const int64_t sequences : {1, 2, 4, 8}) {
      for (const int64_t of_round : {1, 2, 4, 8}) {
        if (8 / sequences % of_round != 0) continue;
        Config config = question.With(choice);
        config.micro_batch_size = sequences;
        config.gradient_accumulation_steps = 8 / sequences;
        config.ebb.micro_batches_per_round = of_round;
        const Answer other = AnswerFor(question, config, choice.recompute, Depth::kTime);
        if (other.time) most = std::max(most, other.time->tokens_per_second);
      }
    }
    EXPECT_GT(found.time->tokens_per_second, 0.97 * most) << WordsOf(found);
  }
}

TEST(Batch, ItIsRoundedToSequencesThatCutWell) {
  EXPECT_EQ(SequencesThatCutWell(31.25), 32);
  EXPECT_EQ(SequencesThatCutWell(61.04), 60);
  EXPECT_EQ(SequencesThatCutWell(125), 126);
  EXPECT_EQ(SequencesThatCutWell(13.2), 13) << "12 and 16 are further than 5%";
  EXPECT_EQ(SequencesThatCutWell(0.6), 1);
  for (double about = 80; about < 1e6; about *= 1.37) {
    const int64_t number = SequencesThatCutWell(about);
    EXPECT_NEAR(static_cast<double>(number), about, 0.05 * about);
    int64_t before = 1;
    for (const int64_t divisor : DivisorsOf(number)) {
      EXPECT_LE(divisor, 2 * before) << number;
      before = divisor;
    }
  }
}

// A prime number of sequences, and one that cuts well: no place of boundary activations,
// micro-batch or round makes the fastest answer faster by more than 2%.
TEST(Batch, NoOtherCutBeatsTheFastestOfAll) {
  struct Asked {
    const char *model, *machine;
    int ranks;
    int64_t sequences;
  };
  for (const auto& [model, machine, ranks, sequences] :
       {Asked{"llama-2-13b", "1xrtx4090", 1, 31}, Asked{"llama-2-7b", "1xrtx4090", 1, 30},
        Asked{"gpt2-xl", "2xrtx4090", 2, 48}, Asked{"llama-2-7b", "4xl40s", 4, 64}}) {
    const Question question = QuestionOf(model, machine, ranks, sequences);
    const std::vector<Answer> answers = AnswerAll(question);
    const Answer* const fastest = Fastest(answers);
    ASSERT_NE(fastest, nullptr);
    const double most = 1.02 * fastest->time->tokens_per_second;
    const int64_t of_rank = question.sequences_of_rank(/*tensor=*/1);
    for (const Tier boundaries : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
      Choice choice = fastest->choice;
      if (!choice.recompute && boundaries != Tier::kDevice) continue;
      choice.boundaries = boundaries;
      for (const int64_t size : DivisorsOf(of_rank)) {
        for (const int64_t of_round : DivisorsOf(of_rank / size)) {
          Config config = question.With(choice);
          config.micro_batch_size = size;
          config.gradient_accumulation_steps = of_rank / size;
          config.ebb.micro_batches_per_round = of_round;
          const Answer other = AnswerFor(question, config, choice.recompute, Depth::kTime, most);
          EXPECT_LE(SpeedOf(other), most)
              << WordsOf(*fastest) << " is slower than " << WordsOf(other);
        }
      }
    }
  }
}

// A try that is not simulated, because its resources alone take too long, is not faster.
TEST(Trials, ABoundIsNeverBelowTheSpeed) {
  for (const char* machine : {"rtx4090-64gb", "4xl40s"}) {
    Question question = QuestionOf("gpt2-xl", machine, machine[0] == '4' ? 4 : 1, 0);
    for (const int64_t micro_batches : {1, 6}) {
      question.config.gradient_accumulation_steps = micro_batches;
      for (const Choice& choice : Choices(question)) {
        const Config config = question.With(choice);
        const auto answer = [&](double enough) {
          return AnswerFor(question, config, choice.recompute, Depth::kTime, enough);
        };
        const Answer whole = answer(0);
        if (!whole.time) continue;
        const double speed = whole.time->tokens_per_second;
        EXPECT_TRUE(answer(0.999 * speed).time) << machine << ": " << WordsOf(whole);
        EXPECT_FALSE(answer(100 * speed).time) << machine << ": " << WordsOf(whole);
      }
    }
  }
}

TEST(Batch, AGivenMicroBatchIsKept) {
  Question question = QuestionOf("gpt2", "8xh100", 8, 64);
  question.micro_batch = 2;
  for (const Answer& answer : AnswerAll(question)) {
    EXPECT_EQ(answer.config.micro_batch_size, 2);
    EXPECT_EQ(answer.config.gradient_accumulation_steps, 4);
  }
}

TEST(Batch, ALargerOneHidesTheCopiesOfACardWithOffload) {
  Question question = QuestionOf("llama-2-7b", "1xrtx4090", 1, 0);
  const std::vector<Answer> answers = AnswerAll(question);
  const Answer* const fastest = Fastest(answers);
  ASSERT_NE(fastest, nullptr);
  const std::optional<LargerBatch> larger = FindLargerBatch(question, *fastest);
  ASSERT_TRUE(larger);
  EXPECT_GE(larger->tokens, kLargerTokens);
  EXPECT_EQ(SequencesOf(larger->answer.config) * 2048, larger->tokens);
  EXPECT_GT(larger->answer.time->tokens_per_second, 2.5 * fastest->time->tokens_per_second);
  question.sequences = 64;
  EXPECT_FALSE(FindLargerBatch(question, AnswerAll(question).back()));
}

// Twice its micro-batch has no room, or would be more than kLargerTokens.
TEST(Batch, AModelWithSlowPlansIsTriedWithItsLargestMicroBatch) {
  Question question = QuestionOf("llama-3-70b", "rtx4090-64gb", 1, 0);
  question.config.ebb.offload_gradients = Tier::kNvme;
  const Answer answer = AnswerFor(question, kOnNvme, Depth::kTime);
  ASSERT_TRUE(answer.fits()) << answer.lacks();
  const std::optional<LargerBatch> larger = FindLargerBatch(question, answer);
  ASSERT_TRUE(larger);
  Config config = larger->answer.config;
  EXPECT_TRUE(larger->answer.fits());
  EXPECT_EQ(config.gradient_accumulation_steps, 1);
  EXPECT_EQ(config.micro_batch_size * 2048, larger->tokens);
  EXPECT_GT(larger->answer.time->tokens_per_second, 3 * answer.time->tokens_per_second);
  config.micro_batch_size *= 2;
  EXPECT_TRUE(2 * larger->tokens > kLargerTokens ||
              !AnswerFor(question, config, true, Depth::kMemory).fits());
}

// With parameters on NVMe, a layer is read twice a step instead of twice a micro-batch.
TEST(Batch, TheChangeThatHelpsMostMayBeTheOrderOfMicroBatches) {
  Question question = QuestionOf("llama-2-13b", "1xrtx4090", 1, 0);
  question.config.gradient_accumulation_steps = 32;
  question.sequences = 32;  // no larger batch is tried
  const Answer answer = AnswerFor(question, kOnNvme, Depth::kTime);
  ASSERT_TRUE(answer.time) << answer.lacks();
  const std::optional<Change> change = BestChange(question, answer);
  ASSERT_TRUE(change);
  EXPECT_THAT(change->what, HasSubstr("\"micro_batches_per_round\": \"all\""));
  EXPECT_GT(change->tokens_per_second, 1.5 * answer.time->tokens_per_second);
}

TEST(Batch, MachinesAreComparedWithTheSame) {
  Question question = QuestionOf("gpt2-xl", "8xh100", 8, 256);
  for (const char* name : {"8xh100", "8xa100-80"}) {
    Offer offer{.machine = *MachineOfName(name), .price_an_hour = 10};
    FillOffer(question, offer);
    ASSERT_GT(offer.hosts, 0);
    EXPECT_EQ(SequencesOf(offer.answer->config) * 8 * offer.hosts, 256) << name;
  }
  question.sequences = 4;  // fewer than ranks
  Offer offer{.machine = question.machine};
  FillOffer(question, offer);
  EXPECT_EQ(offer.hosts, 0);
  EXPECT_THAT(offer.lacks, HasSubstr("4 sequences of 2048 tokens a step: they must be at least one "
                                     "for each of 8 ranks"));
}

}  // namespace
}  // namespace ebb::planner::batch_test
