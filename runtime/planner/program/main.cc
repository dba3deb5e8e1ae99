// ebb-plan: predicts the memory and the time of training a model on a machine, without that
// machine.
#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/difference.h"
#include "ebb/runtime/planner/answer_json.h"
#include "ebb/runtime/planner/answer_table.h"
#include "ebb/runtime/planner/answer_title.h"
#include "ebb/runtime/planner/batch.h"
#include "ebb/runtime/planner/bound_text.h"
#include "ebb/runtime/planner/program/arguments.h"
#include "ebb/runtime/planner/search.h"
#include "ebb/runtime/planner/trials.h"
#include "ebb/runtime/trace/standard_streams.h"

namespace ebb::planner {
namespace {

constexpr int kWrong = 2;

int Fail(std::string_view what) {
  std::fprintf(stderr, "ebb-plan: %.*s\n", static_cast<int>(what.size()), what.data());
  return kWrong;
}

void Warn(const std::string& what) {
  std::fprintf(stderr, "ebb-plan: %s\n", what.c_str());
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::FILE* const file = std::fopen(path.c_str(), "w");
  const bool written =
      file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file != nullptr && std::fclose(file) == 0 && written) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(path, ": it cannot be written"));
}

// Prints with at most 100 columns. Longer lines are broken at spaces, so JSON stays valid.
void Print(std::string text) {
  constexpr size_t kColumns = 100;
  for (size_t line = 0; text.size() - line > kColumns;) {
    const size_t end = text.find('\n', line), space = text.rfind(' ', line + kColumns);
    if (end <= line + kColumns || space == std::string::npos ||
        text.find_first_not_of(' ', line) > space) {
      if (end == std::string::npos) break;
      line = end + 1;
      continue;
    }
    text.replace(space, 1, "\n  ");
    line = space + 1;
  }
  std::fputs(text.c_str(), stdout);
}

// "..., 1.31 times as fast"; if `from` does not fit: "..., which fits with 45447 tokens a second".
std::string Described(const Change& change, const Answer& from) {
  if (!from.time || from.time->tokens_per_second <= 0)
    return absl::StrFormat("%s, which fits with %.0f tokens a second", change.what,
                           change.tokens_per_second);
  return absl::StrFormat("%s, %.2f times as fast", change.what,
                         change.tokens_per_second / from.time->tokens_per_second);
}

std::string ChangesText(const Advised& advised) {
  std::string text;
  if (advised.change)
    absl::StrAppend(&text,
                    "The one change that helps most: ", Described(*advised.change, *advised.chosen),
                    "\n");
  if (!advised.remedy.empty()) absl::StrAppend(&text, "What to change: ", advised.remedy, "\n");
  if (!advised.change && advised.chosen != nullptr && advised.chosen->fits())
    text += "No change of one setting makes it faster by more than 0.5%\n";
  if (advised.larger_batch)
    absl::StrAppendFormat(
        &text, "A step of %d tokens: %.2f times as fast, with %s%s (--batch-tokens)\n",
        advised.larger_batch->tokens,
        advised.larger_batch->answer.time->tokens_per_second /
            advised.chosen->time->tokens_per_second,
        WordsOfBatch(advised.larger_batch->answer.config),
        advised.larger_batch->answer.choice.recompute && !advised.chosen->choice.recompute
            ? ", blocks recomputed"
            : "");
  if (advised.purchase)
    absl::StrAppend(&text, "A machine with ", Described(*advised.purchase, *advised.chosen), "\n");
  return text;
}

// "GPU 4.7, RAM 45.1 GiB".
std::string HeldText(const Answer& answer, const Machine& machine) {
  constexpr double kGiB = 1 << 30;
  const char* const names[] = {machine.is_cpu ? "CPU" : "GPU", "RAM", "NVMe"};
  std::string text;
  for (int tier = 0; tier < kTiers; ++tier) {
    const double gib = static_cast<double>(answer.held[tier]) / kGiB;
    if (gib >= 0.05)
      absl::StrAppendFormat(&text, "%s%s %.1f", text.empty() ? "" : ", ", names[tier], gib);
  }
  return text + " GiB";
}

// Changes beside the chosen answer: of the states, and of the tensor ranks.
void AddOthers(const Arguments& arguments, const Answer* chosen, Advised& advised) {
  if (arguments.all) advised.over_tensor = FastestOfOtherWidths(arguments.question);
  Question small = arguments.question;
  advised.small_states = FindSmallStates(small, chosen);
  small.config = WithSmallStates(small.config);
  if (!arguments.all || small.config == arguments.question.config) return;
  advised.with_small_states = AnswerAll(small);
}

std::string SmallStatesText(const Question& question, const Advised& advised, bool all) {
  std::string text;
  if (advised.small_states) {
    const auto& [answer, keys] = *advised.small_states;
    const double speed = answer.time->tokens_per_second,
                 now = advised.chosen != nullptr && advised.chosen->time
                           ? advised.chosen->time->tokens_per_second
                           : 0;
    absl::StrAppend(&text, "A change of the training: ", keys, ", ",
                    now > 0 ? absl::StrFormat("%.2f times as fast", speed / now)
                            : absl::StrFormat("which fits with %.0f tokens a second", speed),
                    ": ", WordsOf(answer), ", ", HeldText(answer, question.machine), "; ",
                    WhatSmallStatesChange(answer.config), " (--small-states)\n");
  }
  if (all && !advised.with_small_states.empty())
    absl::StrAppend(&text, "With --small-states, which trains differently:\n",
                    AnswerTable(question, advised.with_small_states, /*marked=*/nullptr, all));
  return text;
}

std::string OverTensorText(Question question, std::span<const Answer> answers) {
  if (answers.empty()) return "";
  for (const Answer& answer : answers) question.widths.push_back(answer.choice.tensor);
  return "With tensor ranks, the fastest of each number for the same batch (--tensor N):\n" +
         AnswerTable(question, answers, /*marked=*/nullptr, /*all=*/true);
}

std::string OthersText(const Question& question, const Advised& advised, bool all) {
  return SmallStatesText(question, advised, all) + OverTensorText(question, advised.over_tensor);
}

// A line for each place of the states.
std::string LargestOfStatesText(const Arguments& arguments, const Advised& advised) {
  constexpr const char* kPlaces[] = {"on the device", "in RAM", "on NVMe"};
  std::string text;
  for (const auto& [tier, most] : advised.most_of_states)
    absl::StrAppendFormat(&text, "  states %-14s %d %s\n", kPlaces[static_cast<int>(tier)], most,
                          FactsOf(*arguments.largest).unit);
  return text;
}

std::string TextOf(const Arguments& arguments, const Question& question, const Answer& answer) {
  return absl::StrCat(WordsOf(answer), "\n\n", AnswerText(question, answer),
                      arguments.bound ? BoundText(answer) : "");
}

std::string LargestText(const Arguments& arguments, const Largest& found) {
  const char* const unit = FactsOf(*arguments.largest).unit;
  if (found.most == 0)
    return absl::StrCat("not even one of the ", unit, " fits",
                        arguments.asked ? "" : " in any configuration", "; ", WordsOf(found.answer),
                        ": it ", found.answer.lacks(), "\n");
  std::string text = absl::StrCat(found.is_limit ? "at least " : "at most ", found.most, " ", unit);
  if (*arguments.largest == Quantity::kModel)
    absl::StrAppendFormat(&text, ", %.4g B parameters",
                          static_cast<double>(found.question.model.parameters()) / 1e9);
  if (found.is_limit) text += ", the most that ebb-plan plans";
  const int64_t longest = found.question.model.context;
  if (longest > 0 && found.question.pass.context > longest)
    absl::StrAppend(&text, ", of a model that is made for ", longest);
  return absl::StrCat(text, "\n", TextOf(arguments, found.question, found.answer));
}

// Writes the configuration, and says what a file of it does not say.
absl::Status WriteConfig(const std::string& path, const Answer& answer) {
  if (!answer.refused.ok())
    return absl::Status(
        answer.refused.code(),
        absl::StrCat(path, ": it is not written, because Ebb refuses the configuration: ",
                     answer.refused.message()));
  EBB_RETURN_IF_ERROR(WriteFile(path, answer.config.ToJson() + "\n"));
  if (!answer.fits()) Warn(absl::StrCat(path, ": it does not fit: it ", answer.lacks()));
  if (answer.choice.tensor > 1)
    Warn(absl::StrCat(path, ": the trainer must cut its layers over ", answer.choice.tensor,
                      " tensor ranks itself (ParameterSpec::split)"));
  if (answer.choice.recompute)
    Warn(absl::StrCat(path, ": the trainer must recompute blocks in backward itself"));
  return absl::OkStatus();
}

// Prints the answers, as the text or as JSON, and writes the requested files for the chosen one.
absl::Status Report(const Arguments& arguments, const Question& question,
                    std::span<const Answer> answers, const Advised& advised, std::string text) {
  if (arguments.json) {
    std::fputs(AnswersAsJson(question, answers, advised).c_str(), stdout);
  } else {
    Print(TitleOf(question) + std::move(text));
  }
  const auto& [write_file, trace_file, svg_file] = arguments.files;
  const Answer* const chosen = advised.chosen;
  if (!svg_file.empty())
    EBB_RETURN_IF_ERROR(
        WriteFile(svg_file, AnswersAsSvg(question, ShownAnswers(answers, chosen, arguments.all))));
  if (chosen == nullptr && !(write_file.empty() && trace_file.empty()))
    return absl::NotFoundError("nothing fits, so there is no configuration to write");
  if (!write_file.empty()) EBB_RETURN_IF_ERROR(WriteConfig(write_file, *chosen));
  return trace_file.empty() ? absl::OkStatus() : WriteTrace(question, *chosen, trace_file);
}

absl::Status AnswerLargest(const Arguments& arguments) {
  EBB_ASSIGN_OR_RETURN(const Largest found,
                       FindLargest(arguments.question, *arguments.largest, arguments.asked));
  Advised advised{.largest = arguments.largest,
                  .most = found.most,
                  .most_of_states = found.with_states,
                  .warnings = arguments.warnings};
  std::span<const Answer> answers;
  if (found.most > 0) {
    answers = {&found.answer, 1};
    advised.chosen = &found.answer;
    advised.change = BestChange(found.question, found.answer);
    advised.purchase = BestPurchase(found.question, found.answer);
  } else {
    advised.remedy = RemedyFor(found.question, found.answer, Depth::kMemory).advice.text;
  }
  return Report(arguments, found.question, answers, advised,
                LargestOfStatesText(arguments, advised) + LargestText(arguments, found) +
                    ChangesText(advised));
}

absl::Status Compare(const Arguments& arguments) {
  const Question& question = arguments.question;
  std::vector<Offer> offers = arguments.offers;
  for (Offer& offer : offers) FillOffer(question, offer);
  if (arguments.json) {
    std::fputs(OffersAsJson(question, offers).c_str(), stdout);
  } else {
    Print(OffersText(question, offers));
  }
  return absl::OkStatus();
}

// Puts the answer among the others, which are sorted by stage and place, in place of the one of the
// same choice.
const Answer* PutAmong(std::vector<Answer>& answers, const Answer& chosen) {
  const auto line = [](const Answer& answer) {
    return std::tuple(answer.choice.stage, answer.choice.parameters, answer.choice.states);
  };
  for (Answer& answer : answers) {
    if (answer.choice == chosen.choice && chosen.keys.empty()) return &(answer = chosen);
  }
  const auto after = std::find_if(answers.begin(), answers.end(), [&](const Answer& answer) {
    return line(answer) > line(chosen);
  });
  return &*answers.insert(after, chosen);
}

Answer AnswerOfWidth(const Question& question, const Choice& asked) {
  if (question.sequences > 0) return AnswerForBatch(question, asked, Depth::kTimeAndPeak);
  const bool as_it_is = asked == ChoiceOf(question.config, asked.recompute);
  return AnswerFor(question, as_it_is ? question.config : question.With(asked), asked.recompute,
                   Depth::kTimeAndPeak);
}

// With the fastest width; if it fits with none, with the widest, which needs least memory.
Answer AnswerAsked(const Question& question, Choice asked) {
  std::optional<Answer> best;
  for (const int width : question.possible_widths()) {
    asked.tensor = width;
    Answer answer = AnswerOfWidth(question, asked);
    if (!best || !best->fits() || SpeedOf(answer) > kWorthIt * SpeedOf(*best))
      best = std::move(answer);
  }
  return *std::move(best);
}

absl::Status AnswerQuestion(const Arguments& arguments) {
  const Question& question = arguments.question;
  std::vector<Answer> answers = AnswerAll(question);
  const Answer least = answers.back();
  std::optional<Choice> fastest;
  std::optional<Config> config_of_fastest;
  if (const Answer* const found = Fastest(answers)) {
    fastest = found->choice;
    config_of_fastest = found->config;
  }
  // The chosen answer once more, with the peak.
  std::optional<Answer> chosen;
  Remedy remedy;
  if (arguments.asked) {
    chosen = AnswerAsked(question, *arguments.asked);
    if (!chosen->fits()) {
      remedy = RemedyFor(question, *chosen, Depth::kMemory);
      if (fastest)
        remedy.advice.text = absl::StrCat(config::Difference(question.config, *config_of_fastest),
                                          ", ", WordsOf(*fastest));
    }
  } else if (fastest) {
    chosen = AnswerFor(question, *config_of_fastest, fastest->recompute, Depth::kTimeAndPeak);
    if (std::optional<Answer> faster = WithFreeMemory(question, *chosen, Depth::kTimeAndPeak))
      chosen = *std::move(faster);
  } else {
    remedy = RemedyForBatch(question, least, Depth::kTimeAndPeak);
    chosen = remedy.answer;
  }
  Advised advised{.warnings = arguments.warnings};
  if (!chosen || !chosen->fits()) {
    advised.remedy = remedy.advice.text;
    if (advised.remedy.empty()) advised.remedy = (chosen ? *chosen : least).lacks();
  }
  if (chosen) {
    advised.chosen = PutAmong(answers, *chosen);
    advised.change = BestChange(question, *chosen);
    advised.purchase = BestPurchase(question, *chosen);
    if (chosen->fits()) advised.larger_batch = FindLargerBatch(question, *chosen);
  }
  AddOthers(arguments, chosen ? &*chosen : nullptr, advised);
  std::string text =
      absl::StrCat("\n", AnswerTable(question, answers, advised.chosen, arguments.all));
  if (chosen) {
    absl::StrAppend(&text, "\n* ",
                    arguments.asked ? "as asked: "
                    : fastest       ? "the fastest that fits: "
                                    : "this fits with other keys: ",
                    TextOf(arguments, question, *chosen), ChangesText(advised));
    if (arguments.asked && fastest && chosen->fits() && !(*fastest == chosen->choice))
      absl::StrAppend(&text, "The fastest that fits: ", WordsOf(*fastest), "\n");
  } else {
    absl::StrAppend(&text, "\nNothing fits.\nWhat to change in ", WordsOf(least.choice), ": ",
                    advised.remedy, "\n");
  }
  text += OthersText(question, advised, arguments.all);
  if (const std::string other = OtherParallelism(question); !other.empty())
    absl::StrAppend(&text, other, "\n");
  return Report(arguments, question, answers, advised, std::move(text));
}

int Main(int argc, char** argv) {
  const CommandLine line = ParseCommandLine(argc, argv);
  if (line.exit_code != 0) return Fail(line.text);
  absl::Status status;
  if (!line.arguments) {
    std::fputs(line.text.c_str(), stdout);
  } else {
    for (const std::string& warning : line.arguments->warnings) Warn(warning);
    status = !line.arguments->offers.empty() ? Compare(*line.arguments)
             : line.arguments->largest       ? AnswerLargest(*line.arguments)
                                             : AnswerQuestion(*line.arguments);
  }
  if (!status.ok()) return Fail(std::string(status.message()));
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    return Fail("standard output cannot be written");
  return 0;
}

}  // namespace
}  // namespace ebb::planner

int main(int argc, char** argv) {
  ebb::OpenMissingStandardStreams();
  // Each plan frees what the next one allocates. The kernel would clear these pages every time.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  try {
    return ebb::planner::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    return ebb::planner::Fail("this machine has too little memory to plan a model of that size");
  }
}
