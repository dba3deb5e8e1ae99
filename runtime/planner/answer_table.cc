#include "ebb/runtime/planner/answer_table.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/keys.h"
#include "ebb/runtime/planner/answer_title.h"
#include "ebb/runtime/planner/peers.h"
#include "ebb/runtime/planner/small_states.h"
#include "ebb/sharding/fit/budget.h"

namespace ebb::planner {
namespace {

using sharding::Resource;

constexpr double kGiB = 1 << 30;
constexpr size_t kColumns = 100, kBar = 60;
constexpr int kGiBWidths[] = {7, 7, 8};  // of a tier's column: "GPU GiB"
// The letter of each class in a bar.
constexpr char kLetters[] = "pmgoatkSw";

double GiB(int64_t bytes) {
  return static_cast<double>(bytes) / kGiB;
}

// "3.8", "3,897".
std::string HoursText(double hours) {
  return hours < 1000 ? absl::StrFormat("%.3g", hours) : Grouped(hours);
}

// "9.41", "93,536".
std::string PriceText(double price) {
  return price < 1000 ? absl::StrFormat("%.2f", price) : Grouped(price);
}

// "0.031", "4.2", "121".
std::string Times(double ratio) {
  return ratio < 10 ? absl::StrFormat("%.2g", ratio) : Grouped(ratio);
}

const char* TierName(const Machine& machine, size_t tier) {
  constexpr const char* kNames[] = {"GPU", "RAM", "NVMe"};
  return machine.is_cpu && tier == 0 ? "CPU" : kNames[tier];
}

// The resource that the step waits for most, with its share of the step.
std::string WaitsFor(const StepTime& time) {
  const auto& lines = time.simulated.critical.lines;
  double all = 0;
  for (const double seconds : lines) all += seconds;
  const int line = time.simulated.critical_line();
  if (all <= 0) return "";
  const std::string_view name = sharding::NameOfLine(line);
  return absl::StrFormat("%s %.0f%%", absl::string_view(name.data(), name.size()),
                         100 * lines[line] / all);
}

// Micro-batches, and how many sequences each has: "8 of 4", "8 of 4, all".
std::string BatchOf(const Config& config) {
  const int64_t of_round = config.ebb.micro_batches_per_round;
  return absl::StrCat(config.gradient_accumulation_steps, " of ", config.micro_batch_size,
                      of_round == 0  ? ", all"
                      : of_round > 1 ? absl::StrCat(", by ", of_round)
                                     : "");
}

const char* PlaceName(Tier tier) {
  constexpr const char* kNames[] = {"device", "RAM", "NVMe"};
  return kNames[static_cast<int>(tier)];
}

// "no", "yes, RAM".
std::string Recomputes(const Choice& choice) {
  const std::string word = choice.recompute ? "yes" : "no";
  return choice.boundaries == Tier::kDevice
             ? word
             : absl::StrCat(word, ", ", PlaceName(choice.boundaries));
}

std::string LineOf(const Question& question, const Answer& answer, bool marked) {
  const Choice& choice = answer.choice;
  const bool shows_tensor = ShowsTensor(question);
  std::string line = marked ? "* " : "  ";
  if (shows_tensor) absl::StrAppendFormat(&line, "%-6d ", choice.tensor);
  absl::StrAppendFormat(&line, "%d     %-*s %-6s %-9s ", choice.stage, shows_tensor ? 6 : 10,
                        PlaceName(choice.parameters), PlaceName(choice.states), Recomputes(choice));
  if (!answer.refused.ok()) {
    const absl::string_view message = answer.refused.message();
    return line + config::Shortened({message.data(), message.size()}, kColumns - line.size() - 4);
  }
  for (size_t tier = 0; tier < answer.held.size(); ++tier)
    absl::StrAppendFormat(&line, "%*.1f ", kGiBWidths[tier], GiB(answer.held[tier]));
  if (answer.time) {
    absl::StrAppendFormat(&line, "%7.3g %9s  %s", answer.time->simulated.seconds_per_step,
                          Grouped(answer.time->tokens_per_second),
                          question.sequences > 0 ? BatchOf(answer.config) : WaitsFor(*answer.time));
    return line;
  }
  const char* separator = "no room: ";
  for (size_t tier = 0; tier < answer.held.size(); ++tier) {
    if (answer.held[tier] <= answer.room[tier]) continue;
    absl::StrAppend(&line, separator, TierName(question.machine, tier));
    separator = ", ";
  }
  return line;
}

// One letter of a class for each part that is held, and one dot for each part that is free.
std::string BarOf(const Answer& answer, Tier tier) {
  const auto of = static_cast<size_t>(tier);
  const double whole = static_cast<double>(std::max(answer.room[of], answer.held[of]));
  std::string bar;
  double until = 0;
  for (const MemoryRow& row : answer.memory) {
    if (row.tier != tier) continue;
    until += static_cast<double>(row.predicted_bytes);
    const auto end = static_cast<size_t>(std::llround(kBar * until / whole));
    if (end > bar.size()) bar.resize(std::min(end, kBar), kLetters[static_cast<int>(row.state)]);
  }
  bar.resize(kBar, '.');
  return bar;
}

std::string MemoryText(const Question& question, const Answer& answer) {
  std::string text = absl::StrFormat("Memory of a rank, GiB\n  %-13s %9s %9s %9s\n", "",
                                     TierName(question.machine, 0), "RAM", "NVMe");
  for (int c = 0; c < kStateClasses; ++c) {
    TierBytes bytes = {};
    for (const MemoryRow& row : answer.memory) {
      if (static_cast<int>(row.state) == c)
        bytes[static_cast<int>(row.tier)] += static_cast<int64_t>(row.predicted_bytes);
    }
    if (bytes == TierBytes{}) continue;
    absl::StrAppendFormat(&text, "  %c %-11s", kLetters[c],
                          std::string(Name(static_cast<StateClass>(c))));
    for (const int64_t each : bytes) {
      if (each == 0) {
        absl::StrAppendFormat(&text, " %9s", "-");
      } else {
        absl::StrAppendFormat(&text, " %9.2f", GiB(each));
      }
    }
    text += "\n";
  }
  for (size_t tier = 0; tier < answer.held.size(); ++tier) {
    if (answer.held[tier] == 0) continue;
    absl::StrAppendFormat(&text, "  %-5s|%s| %.1f of %.1f GiB\n", TierName(question.machine, tier),
                          BarOf(answer, static_cast<Tier>(tier)), GiB(answer.held[tier]),
                          GiB(answer.room[tier]));
  }
  if (const int here = question.machine.ranks_per_host(question.ranks);
      here > 1 && (answer.held[1] + answer.held[2]) * here >= (1 << 30)) {
    const double gib = here / kGiB;
    absl::StrAppendFormat(&text, "  %d ranks of a host: RAM %s GiB", here,
                          Grouped(static_cast<double>(answer.held[1]) * gib));
    if (answer.held[2] > 0)
      absl::StrAppendFormat(&text, ", NVMe %s GiB",
                            Grouped(static_cast<double>(answer.held[2]) * gib));
    text += "\n";
  }
  if (const int64_t locked = answer.locked_bytes(); locked > 0 && !question.machine.is_cpu)
    absl::StrAppendFormat(&text, "  %.2f GiB of the RAM are locked (pinned)\n", GiB(locked));
  return text;
}

// The peak, and the classes that hold most of it.
std::string PeakText(const Peak& peak) {
  std::vector<std::pair<int64_t, int>> classes;
  for (int c = 0; c < kStateClasses; ++c) {
    if (peak.classes[c] > 0) classes.emplace_back(peak.classes[c], c);
  }
  std::sort(classes.rbegin(), classes.rend());
  std::string text =
      absl::StrFormat("The peak is in the %s: %.2f GiB\n ", peak.moment, GiB(peak.bytes));
  for (const auto& [bytes, c] : classes)
    absl::StrAppendFormat(&text, " %s %.2f,", std::string(Name(static_cast<StateClass>(c))),
                          GiB(bytes));
  text.back() = '\n';
  return text;
}

// "10^9", "1.5e+10".
std::string TokensText(double tokens) {
  const double power = std::round(std::log10(tokens));
  return std::pow(10, power) == tokens && power > 5 ? absl::StrFormat("10^%.0f", power)
                                                    : Grouped(tokens);
}

// "10^9 tokens take 3.8 hours and cost 9.41: 2.5 an hour for 1 host".
std::string RunText(const Question& question, double tokens_per_second) {
  const double hours = question.hours_of(tokens_per_second);
  const int hosts = question.hosts();
  std::string text =
      absl::StrCat(TokensText(question.tokens), " tokens take ", HoursText(hours), " hours");
  if (question.price_an_hour > 0)
    absl::StrAppendFormat(&text, " and cost %s: %g an hour for %s",
                          PriceText(hours * question.price_an_hour * hosts), question.price_an_hour,
                          hosts == 1 ? "a host" : absl::StrCat("each of ", hosts, " hosts"));
  return text + "\n";
}

std::string StepText(const Question& question, const Answer& answer) {
  const StepTime& time = *answer.time;
  const double seconds = time.simulated.seconds_per_step;
  std::string text = absl::StrFormat(
      "A step takes %.3g s: %s tokens a second, %.3g TFLOPS a rank (%.0f%% of the machine's)\n",
      seconds, Grouped(time.tokens_per_second), time.flops_per_second / 1e12,
      100 * time.flops_per_second / question.machine.flops_of_rank(question.ranks));
  std::vector<std::pair<double, int>> lines;
  for (int line = 0; line <= sharding::kCallerLine; ++line) {
    const double on = time.simulated.critical.lines[line];
    if (on > 0.002 * seconds) lines.emplace_back(on, line);
  }
  std::sort(lines.rbegin(), lines.rend());
  std::string path = "  its critical path:";
  const char* separator = " ";
  for (const auto& [on, line] : lines) {
    const std::string part =
        absl::StrFormat("%s%s %.3g s", separator, std::string(sharding::NameOfLine(line)), on);
    if (path.size() + part.size() > kColumns) break;
    path += part;
    separator = ", ";
  }
  absl::StrAppend(&text, path, "\n");
  if (time.tensor_seconds > 0)
    absl::StrAppendFormat(&text,
                          "  of which the layers' exchanges over %d tensor ranks %.3g s, %.3g GB a "
                          "rank\n",
                          answer.choice.tensor, time.tensor_seconds, time.tensor_bytes / 1e9);
  absl::StrAppend(&text, "Moved a step by a rank, GB\n");
  constexpr std::pair<Resource, const char*> kLinks[] = {
      {Resource::kPeers, "GPU link"},     {Resource::kNetwork, "network"},
      {Resource::kToDevice, "PCIe up"},   {Resource::kToHost, "PCIe down"},
      {Resource::kDiskRead, "disk read"}, {Resource::kDiskWrite, "disk write"}};
  separator = "  ";
  for (const auto& [resource, name] : kLinks) {
    if (time.moved[resource] <= 0) continue;
    absl::StrAppendFormat(&text, "%s%s %.3g", separator, name, time.moved[resource] / 1e9);
    separator = ", ";
  }
  text += separator[0] == ' ' ? "  nothing\n" : "\n";
  const double wear = DiskBytesWrittenADay(answer, question.machine, question.ranks);
  if (wear > 0)
    absl::StrAppendFormat(&text, "A host's disks write %.3g TB a day, %s times their capacity",
                          wear / 1e12, Times(wear / question.machine.disk));
  if (const double days = DaysOfDisks(answer, question.machine, question.ranks); days > 0)
    absl::StrAppendFormat(&text, "; they last %s days", Grouped(days));
  if (wear > 0) text += "\n";
  if (question.tokens > 0) text += RunText(question, time.tokens_per_second);
  return text;
}

std::string PeersText(const Question& question, const Answer& answer) {
  std::string text = absl::StrFormat("Other programs, without activations, GiB\n  %-22s %9s %9s\n",
                                     "", "of a GPU", "host RAM");
  for (const PeerEstimate& peer : PeerEstimates(question, answer.choice)) {
    const std::string ram = peer.host_ram > 0 ? absl::StrFormat("%.1f", peer.host_ram / kGiB) : "-",
                      line = absl::StrFormat("  %-22s %9.1f %9s  %s", peer.program, peer.gpu / kGiB,
                                             ram, peer.remark);
    absl::StrAppend(&text, absl::StripTrailingAsciiWhitespace(line), "\n");
  }
  return text;
}

}  // namespace

std::string WordsOf(const Choice& choice) {
  std::string text =
      absl::StrCat(choice.tensor > 1 ? absl::StrCat(choice.tensor, " tensor ranks, ") : "",
                   "stage ", choice.stage);
  const auto add = [&](const char* what, Tier tier) {
    if (tier == Tier::kDevice) return;
    absl::StrAppend(&text, ", ", what, tier == Tier::kCpu ? " in RAM" : " on NVMe");
  };
  add("parameters", choice.parameters);
  add("states", choice.states);
  add("boundary activations", choice.boundaries);
  if (choice.recompute) text += ", blocks recomputed";
  return text;
}

std::string WordsOf(const Answer& answer) {
  const int64_t of_round = answer.config.ebb.micro_batches_per_round;
  return absl::StrCat(WordsOf(answer.choice),
                      answer.config.gradient_accumulation_steps > 1 && of_round != 1
                          ? absl::StrCat(", ", WordsOfBatch(answer.config))
                          : "",
                      answer.keys.empty() ? "" : ", with ", answer.keys);
}

std::vector<const Answer*> ShownAnswers(std::span<const Answer> answers, const Answer* marked,
                                        bool all) {
  std::vector<const Answer*> shown;
  const auto better = [&](const Answer& a, const Answer& b) {
    if (&a == marked || &b == marked) return &a == marked;
    if (a.time && b.time) return a.time->tokens_per_second > b.time->tokens_per_second;
    if (a.time || b.time) return a.time.has_value();
    return a.held[0] < b.held[0];
  };
  for (const Answer& answer : answers) {
    const Choice& c = answer.choice;
    if (!all && !shown.empty()) {
      const Choice& last = shown.back()->choice;
      if (last.stage == c.stage && last.parameters == c.parameters && last.states == c.states) {
        if (better(answer, *shown.back())) shown.back() = &answer;
        continue;
      }
    }
    shown.push_back(&answer);
  }
  return shown;
}

std::string AnswerTable(const Question& question, std::span<const Answer> answers,
                        const Answer* marked, bool all) {
  std::string text = absl::StrFormat(
      "  %s%-5s %-6s %-6s %-9s %7s %7s %8s %7s %9s  %s\n", ShowsTensor(question) ? "tensor " : "",
      "stage", ShowsTensor(question) ? "params" : "parameters", "states", "recompute",
      absl::StrCat(TierName(question.machine, 0), " GiB"), "RAM GiB", "NVMe GiB", "step s",
      "tokens/s", question.sequences > 0 ? "micro-batches" : "waits for");
  for (const Answer* answer : ShownAnswers(answers, marked, all))
    absl::StrAppend(&text, LineOf(question, *answer, answer == marked), "\n");
  return text;
}

std::string OffersText(const Question& question, std::span<const Offer> offers) {
  const double tokens = question.tokens > 0 ? question.tokens : 1e9;
  const int64_t of_step = question.sequences * question.pass.context;
  std::string text = absl::StrFormat(
      "%s: %s parameters, %s; %d tokens a sequence\n%s%s"
      "hours and price are of %s tokens\n\n"
      "  %-14s %5s %5s %9s %12s %9s %12s\n",
      NameOf(question.model), ParametersText(question.model.parameters()),
      std::string(Name(question.config.compute)), question.pass.context,
      TrainedText(question.model),
      of_step > 0 ? absl::StrFormat("a step of %s tokens on every machine (--batch-tokens)\n",
                                    Grouped(static_cast<double>(of_step)))
                  : "",
      TokensText(tokens), "machine", "hosts", "ranks", "tokens/s", "1 hour costs", "hours",
      "price");
  const Offer* const cheapest = Cheapest(offers);
  for (const Offer& offer : offers) {
    const std::string& name = offer.machine.name;
    std::string line = absl::StrFormat("%s %-14s ", &offer == cheapest ? "*" : " ",
                                       config::Shortened(name.substr(name.rfind('/') + 1), 14));
    if (offer.hosts == 0) {
      absl::StrAppend(&text, line, offer.lacks, "\n");
      continue;
    }
    const auto price = [&](double of) { return offer.price_an_hour > 0 ? PriceText(of) : "-"; };
    absl::StrAppendFormat(
        &line, "%5d %5d %9s %12s %9s %12s\n    %s\n", offer.hosts,
        static_cast<int>(offer.machine.gpus) * offer.hosts,
        Grouped(offer.answer->time->tokens_per_second), price(offer.price_an_hour * offer.hosts),
        HoursText(offer.hours_of(tokens)), price(offer.price_of(tokens)), WordsOf(*offer.answer));
    text += line;
  }
  return text;
}

std::string AnswerText(const Question& question, const Answer& answer) {
  if (!answer.refused.ok()) return absl::StrCat(std::string(answer.refused.message()), "\n");
  std::string text = MemoryText(question, answer);
  if (answer.peak) text += PeakText(*answer.peak);
  if (answer.time) text += StepText(question, answer);
  if (!answer.fits()) absl::StrAppend(&text, "It does not fit: it ", answer.lacks(), "\n");
  // The others' formulae are of models that train whole.
  if (HasPeers(question, answer.choice)) text += PeersText(question, answer);
  return text;
}

}  // namespace ebb::planner
