// Cuts the batch of a step into micro-batches, and these into rounds; and finds what a larger batch
// gives.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "ebb/runtime/planner/answer.h"

namespace ebb::planner {

// Micro-batches that the config gives are the question's sequences and its micro-batch, which the
// search puts into rounds, unless the config says into which.
Question WithGivenBatch(Question question);

// The fastest way to cut the question's sequences into micro-batches and rounds of them: the
// largest micro-batch that fits, alone in a round, or with others in it, or smaller ones of which
// more are in a round. It has no time if it is not above `enough` tokens a second.
Answer AnswerForBatch(const Question& question, const Choice& choice, Depth depth,
                      double enough = 0);

// The fastest answer with each further width of the question's models, for the same batch.
std::vector<Answer> FastestOfOtherWidths(const Question& question);

// RemedyFor with the step's time. What it makes room for is cut again, with boundary activations in
// each place, if the question has sequences.
Remedy RemedyForBatch(const Question& question, const Answer& lacking, Depth depth);

// A larger batch, which trains differently, and its answer, if it is faster by 5%: at least
// kLargerTokens a step and four times `from`'s, at its stage and tiers, with or without
// recomputing. If NVMe holds more than kLargerParametersOnNvme of a rank, each plan takes seconds:
// then only the largest micro-batch that fits.
inline constexpr int64_t kLargerTokens = 1 << 19, kLargerParametersOnNvme = 20'000'000'000;
struct LargerBatch {
  int64_t tokens = 0;  // of a step of all ranks
  Answer answer;
};
std::optional<LargerBatch> FindLargerBatch(const Question& question, const Answer& from);

// Rising.
std::vector<int64_t> DivisorsOf(int64_t number);

// The sequences of a rank nearest to `about`, and within 5% of it, that cut into micro-batches of
// many sizes: each divisor is at most twice the one before, so that a micro-batch takes at least
// half of what fits. If no number there does, the nearest.
int64_t SequencesThatCutWell(double about);

// The largest of `numbers`, which rise, for which `fits`; 0: none. What is too large stays too
// large.
int64_t LargestThatFits(std::span<const int64_t> numbers, const std::function<bool(int64_t)>& fits);

}  // namespace ebb::planner
