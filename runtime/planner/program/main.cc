// ebb-plan: predicts the memory and the time of training a model on a machine, without that
// machine.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/planner/answer_json.h"
#include "ebb/runtime/planner/answer_table.h"
#include "ebb/runtime/planner/program/arguments.h"
#include "ebb/runtime/planner/search.h"
#include "ebb/runtime/trace/standard_streams.h"

namespace ebb::planner {
namespace {

constexpr int kWrong = 2;

int Fail(std::string_view what) {
  std::fprintf(stderr, "ebb-plan: %.*s\n", static_cast<int>(what.size()), what.data());
  return kWrong;
}

bool WriteFile(const std::string& path, const std::string& text) {
  std::FILE* const file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return false;
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  return std::fclose(file) == 0 && written;
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

std::string TextOfRemedy(const sharding::FoundAdvice& remedy, const Answer& answer) {
  return remedy.text.empty() ? answer.lacks() : remedy.text;
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
  if (advised.purchase)
    absl::StrAppend(&text, "A machine with ", Described(*advised.purchase, *advised.chosen), "\n");
  return text;
}

std::string LargestText(const Arguments& arguments, const Largest& found) {
  constexpr const char* kWhat[] = {"layers", "sequences a micro-batch", "tokens a sequence"};
  const char* const what = kWhat[static_cast<int>(*arguments.largest)];
  if (found.most == 0)
    return absl::StrCat("not even one of the ", what, " fits",
                        arguments.asked ? "" : " in any configuration", "; ", WordsOf(found.answer),
                        ": it ", found.answer.lacks(), "\n");
  std::string text = absl::StrCat(found.is_limit ? "at least " : "at most ", found.most, " ", what);
  if (*arguments.largest == Quantity::kModel)
    absl::StrAppendFormat(&text, ", %.4g B parameters",
                          static_cast<double>(found.question.model.parameters()) / 1e9);
  if (found.is_limit) text += ", the most that ebb-plan plans";
  const int64_t longest = found.question.model.context;
  if (longest > 0 && found.question.pass.context > longest)
    absl::StrAppend(&text, ", of a model that is made for ", longest);
  return absl::StrCat(text, "\n", WordsOf(found.answer), "\n\n",
                      AnswerText(found.question, found.answer));
}

void Warn(const std::string& what) {
  std::fprintf(stderr, "ebb-plan: %s\n", what.c_str());
}

// Says what a file of this configuration does not say.
void WarnOf(const std::string& path, const Answer& answer) {
  if (!answer.fits()) Warn(absl::StrCat(path, ": it does not fit: it ", answer.lacks()));
  if (answer.choice.recompute)
    Warn(absl::StrCat(path, ": the trainer must recompute blocks in backward itself"));
}

// Writes the requested files for the chosen configuration.
int WriteFiles(const Arguments& arguments, const Question& question,
               std::span<const Answer* const> shown, const Answer* chosen) {
  if (!arguments.svg_file.empty() && !WriteFile(arguments.svg_file, AnswersAsSvg(question, shown)))
    return Fail(absl::StrCat(arguments.svg_file, ": it cannot be written"));
  if (arguments.write_file.empty() && arguments.trace_file.empty()) return 0;
  if (chosen == nullptr) return Fail("nothing fits, so there is no configuration to write");
  if (!arguments.write_file.empty()) {
    if (!chosen->refused.ok())
      return Fail(absl::StrCat(arguments.write_file,
                               ": it is not written, because Ebb refuses the configuration: ",
                               std::string(chosen->refused.message())));
    if (!WriteFile(arguments.write_file, chosen->config.ToJson() + "\n"))
      return Fail(absl::StrCat(arguments.write_file, ": it cannot be written"));
    WarnOf(arguments.write_file, *chosen);
  }
  if (arguments.trace_file.empty()) return 0;
  const absl::Status traced = WriteTrace(question, *chosen, arguments.trace_file);
  return traced.ok() ? 0 : Fail(std::string(traced.message()));
}

int AnswerLargest(const Arguments& arguments) {
  const absl::StatusOr<Largest> found =
      FindLargest(arguments.question, *arguments.largest, arguments.asked);
  if (!found.ok()) return Fail(std::string(found.status().message()));
  const Answer* const chosen = found->most > 0 ? &found->answer : nullptr;
  Advised advised{.chosen = chosen, .largest = arguments.largest, .most = found->most};
  if (chosen != nullptr) {
    advised.change = BestChange(found->question, *chosen);
    advised.purchase = BestPurchase(found->question, *chosen);
  } else {
    advised.remedy = RemedyFor(found->question, found->answer).text;
  }
  if (arguments.json) {
    std::fputs(
        AnswersAsJson(found->question, {chosen, chosen == nullptr ? 0u : 1u}, advised).c_str(),
        stdout);
  } else {
    Print(TitleOf(found->question) + LargestText(arguments, *found) + ChangesText(advised));
  }
  return WriteFiles(arguments, found->question, {&chosen, chosen == nullptr ? 0u : 1u}, chosen);
}

int Compare(Arguments arguments) {
  const Question& question = arguments.question;
  for (Offer& offer : arguments.offers) FillOffer(question, offer);
  if (arguments.json) {
    std::fputs(OffersAsJson(question, arguments.offers).c_str(), stdout);
  } else {
    Print(OffersText(question, arguments.offers));
  }
  return 0;
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

int AnswerQuestion(const Arguments& arguments) {
  const Question& question = arguments.question;
  std::vector<Answer> answers = AnswerAll(question);
  std::optional<Choice> fastest;
  if (const Answer* const found = Fastest(answers)) fastest = found->choice;
  // The chosen answer once more, with the peak.
  std::optional<Answer> chosen;
  sharding::FoundAdvice remedy;
  if (arguments.asked) {
    const bool as_it_is = *arguments.asked == ChoiceOf(question.config, arguments.asked->recompute);
    chosen = AnswerFor(question, as_it_is ? question.config : question.With(*arguments.asked),
                       arguments.asked->recompute, Depth::kTimeAndPeak);
  } else if (fastest) {
    chosen = AnswerFor(question, *fastest, Depth::kTimeAndPeak);
  } else {
    remedy = RemedyFor(question, answers.back());
    chosen = AnswerOf(question, remedy, answers.back(), Depth::kTimeAndPeak);
  }
  Advised advised;
  if (chosen) {
    if (!chosen->fits()) remedy = RemedyFor(question, *chosen);
    advised = {.chosen = PutAmong(answers, *chosen),
               .change = BestChange(question, *chosen),
               .purchase = BestPurchase(question, *chosen)};
  }
  if (!chosen || !chosen->fits())
    advised.remedy = TextOfRemedy(remedy, chosen ? *chosen : answers.back());
  if (arguments.json) {
    std::fputs(AnswersAsJson(question, answers, advised).c_str(), stdout);
  } else {
    std::string text = TitleOf(question) + "\n";
    text += AnswerTable(question, answers, advised.chosen, arguments.all);
    if (chosen) {
      absl::StrAppend(&text, "\n* ",
                      arguments.asked ? "as asked: "
                      : fastest       ? "the fastest that fits: "
                                      : "this fits with other keys: ",
                      WordsOf(*chosen), "\n\n", AnswerText(question, *chosen),
                      ChangesText(advised));
      if (arguments.asked && fastest && !(*fastest == chosen->choice))
        absl::StrAppend(&text, "The fastest that fits: ", WordsOf(*fastest), "\n");
    } else {
      absl::StrAppend(&text, "\nNothing fits.\nWhat to change in ", WordsOf(answers.back().choice),
                      ": ", advised.remedy, "\n");
    }
    Print(std::move(text));
  }
  const std::vector<const Answer*> shown = ShownAnswers(answers, advised.chosen, arguments.all);
  return WriteFiles(arguments, question, shown, advised.chosen);
}

int Main(int argc, char** argv) {
  const CommandLine line = ParseCommandLine(argc, argv);
  if (line.exit_code != 0) return Fail(line.text);
  int code = 0;
  if (!line.arguments) {
    std::fputs(line.text.c_str(), stdout);
  } else {
    for (const std::string& warning : line.arguments->warnings) Warn(warning);
    code = !line.arguments->offers.empty() ? Compare(*line.arguments)
           : line.arguments->largest       ? AnswerLargest(*line.arguments)
                                           : AnswerQuestion(*line.arguments);
  }
  if (code == 0 && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0))
    return Fail("standard output cannot be written");
  return code;
}

}  // namespace
}  // namespace ebb::planner

int main(int argc, char** argv) {
  ebb::OpenMissingStandardStreams();
  try {
    return ebb::planner::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    return ebb::planner::Fail("this machine has too little memory to plan a model of that size");
  }
}
