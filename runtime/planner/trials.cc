#include "ebb/runtime/planner/trials.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::planner {

double SpeedOf(const Answer& answer) {
  return answer.fits() && answer.time ? answer.time->tokens_per_second : 0;
}

std::vector<Answer> AnswersOf(size_t count, const std::function<Answer(size_t)>& answer) {
  if (count == 0) return {};
  std::vector<Answer> answers(count);
  constexpr int kAtOnce = 8;
  const int parts = static_cast<int>(count);
  ThreadTeam team(std::min({CoreShare::Cores(), kAtOnce, parts}), /*parts_per_thread=*/parts);
  team.Run(parts, /*grain=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) answers[i] = answer(static_cast<size_t>(i));
  });
  return answers;
}

std::optional<Tried> FastestOf(std::span<const Try> tries, double least) {
  std::optional<Tried> best;
  for (size_t i = 0; i < tries.size(); ++i) {
    // One after the other, so that the same tries are simulated on every machine.
    const double enough = best ? kWorthIt * SpeedOf(best->answer) : least;
    Answer answer =
        AnswerFor(*tries[i].question, tries[i].config, tries[i].recompute, Depth::kTime, enough);
    if (SpeedOf(answer) > enough) best = Tried{.number = i, .answer = std::move(answer)};
  }
  return best;
}

}  // namespace ebb::planner
