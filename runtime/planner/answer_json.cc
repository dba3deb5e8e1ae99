#include "ebb/runtime/planner/answer_json.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "ebb/runtime/planner/answer_table.h"
#include "ebb/runtime/planner/answer_title.h"
#include "ebb/runtime/planner/peers.h"
#include "ebb/sharding/fit/budget.h"
#include "nlohmann/json.hpp"

namespace ebb::planner {
namespace {

using Json = nlohmann::ordered_json;
using sharding::Resource;
using sharding::SizeText;

std::string Text(std::string_view text) {
  return std::string(text);
}

constexpr const char* kStatesWords[] = {"fp32", "bf16", "8bit"};  // by OptimizerStates

Json JsonOf(const Choice& choice) {
  return {{"stage", choice.stage},
          {"parameters", Text(Name(choice.parameters))},
          {"states", Text(Name(choice.states))},
          {"boundaries", Text(Name(choice.boundaries))},
          {"recompute", choice.recompute},
          {"tensor", choice.tensor}};
}

Json SecondsOf(const sharding::StepSeconds& of) {
  Json json = {{"streams", Json::object()}, {"resources", Json::object()}};
  for (int line = 0; line <= sharding::kCallerLine; ++line) {
    const double seconds = of.lines[line];
    if (seconds > 0) json["streams"][Text(sharding::NameOfLine(line))] = seconds;
  }
  for (int r = 0; r < sharding::kResources; ++r) {
    const double seconds = of.resources[r];
    if (seconds > 0) json["resources"][Text(Name(static_cast<Resource>(r)))] = seconds;
  }
  return json;
}

// Lines of a step's bound by their names.
Json JsonOf(const sharding::StepBound& bound) {
  Json lines = Json::object();
  for (const auto& [name, seconds] : bound.lines()) lines[name] = seconds;
  Json json = {{"seconds", bound.seconds()}, {"line", bound.line()}, {"lines", std::move(lines)}};
  if (bound.order > 0) json["order_waits_for"] = bound.order_word();
  json["updates_await_the_norm"] = bound.awaits_verdict;
  return json;
}

Json TiersOf(const TierBytes& bytes) {
  Json json;
  for (int tier = 0; tier < kTiers; ++tier) json[Text(Name(static_cast<Tier>(tier)))] = bytes[tier];
  return json;
}

Json JsonOf(const Question& question, const Answer& answer) {
  Json json = JsonOf(answer.choice);
  json["fits"] = answer.fits();
  if (!answer.keys.empty()) json["keys"] = answer.keys;
  if (!answer.refused.ok()) {
    json["refused"] = std::string(answer.refused.message());
    return json;
  }
  json["micro_batch_size"] = answer.config.micro_batch_size;
  json["micro_batches"] = answer.config.gradient_accumulation_steps;
  json["micro_batches_per_round"] = answer.config.ebb.micro_batches_per_round;
  json["bytes"] = TiersOf(answer.held);
  TierBytes of_host = answer.held;
  for (int64_t& bytes : of_host) bytes *= question.machine.ranks_per_host(question.ranks);
  json["bytes_of_host"] = TiersOf(of_host);
  json["room"] = TiersOf(answer.room);
  if (!question.machine.is_cpu) json["locked_bytes"] = answer.locked_bytes();
  for (const MemoryRow& row : answer.memory)
    json["classes"][Text(Name(row.tier))][Text(Name(row.state))] = row.predicted_bytes;
  if (answer.peak) {
    json["peak"] = {{"moment", answer.peak->moment}, {"bytes", answer.peak->bytes}};
    for (int c = 0; c < kStateClasses; ++c) {
      if (const int64_t bytes = answer.peak->classes[c]; bytes > 0)
        json["peak"]["classes"][Text(Name(static_cast<StateClass>(c)))] = bytes;
    }
  }
  if (!answer.time) return json;
  const StepTime& time = *answer.time;
  json["step_seconds"] = time.simulated.seconds_per_step;
  json["tokens_per_second"] = time.tokens_per_second;
  json["flops_per_second_of_rank"] = time.flops_per_second;
  if (answer.choice.tensor > 1) {
    json["tensor_exchange_seconds"] = time.tensor_seconds;
    json["tensor_exchange_bytes"] = time.tensor_bytes;
  }
  json["critical"] = SecondsOf(time.simulated.critical);
  json["busy"] = SecondsOf(time.simulated.busy);
  json["bound"] = JsonOf(time.bound);
  for (const Resource link : {Resource::kPeers, Resource::kNetwork, Resource::kToDevice,
                              Resource::kToHost, Resource::kDiskRead, Resource::kDiskWrite})
    json["moved_bytes"][Text(Name(link))] = time.moved[link];
  json["disk_bytes_written_a_day_of_host"] =
      DiskBytesWrittenADay(answer, question.machine, question.ranks);
  if (const double days = DaysOfDisks(answer, question.machine, question.ranks); days > 0)
    json["days_of_disks"] = days;
  if (question.tokens > 0) {
    const double hours = question.hours_of(time.tokens_per_second);
    json["hours"] = hours;
    if (question.price_an_hour > 0)
      json["price"] = hours * question.price_an_hour * question.hosts();
  }
  return json;
}

Json JsonOf(const std::optional<LargerBatch>& larger) {
  if (!larger) return nullptr;
  const Config& config = larger->answer.config;
  return {{"tokens", larger->tokens},
          {"tokens_per_second", larger->answer.time->tokens_per_second},
          {"micro_batch_size", config.micro_batch_size},
          {"micro_batches", config.gradient_accumulation_steps},
          {"micro_batches_per_round", config.ebb.micro_batches_per_round},
          {"recompute", larger->answer.choice.recompute}};
}

Json JsonOf(const Question& question, const std::optional<SmallStates>& small) {
  if (!small) return nullptr;
  return {{"change", small->keys},
          {"changes_the_training", WhatSmallStatesChange(small->answer.config)},
          {"answer", JsonOf(question, small->answer)}};
}

Json JsonOf(const Model& model) {
  Json json = {{"name", model.name},
               {"parameters", model.parameters()},
               {"trained_parameters", model.trained_parameters()},
               {"units", model.units.size()},
               {"operations_are_estimated", model.context == 0}};
  if (!model.trains.empty()) json["trains"] = model.trains;
  if (!model.stored_bytes.empty()) json["stored_bytes"] = model.stored_bytes;
  return json;
}

Json JsonOf(const std::optional<Change>& change) {
  if (!change) return nullptr;
  return {{"change", change->what}, {"tokens_per_second", change->tokens_per_second}};
}

Json JsonOf(std::span<const PeerEstimate> peers) {
  Json json = Json::array();
  for (const PeerEstimate& peer : peers)
    json.push_back({{"program", peer.program},
                    {"gpu_bytes", std::llround(peer.gpu)},
                    {"host_ram_bytes", std::llround(peer.host_ram)},
                    {"remark", peer.remark}});
  return json;
}

// By class; that of kDriver last.
constexpr const char* kColours[kStateClasses + 1] = {"#4e79a7", "#a0cbe8", "#e15759", "#59a14f",
                                                     "#f28e2b", "#edc948", "#bab0ac", "#9c755f",
                                                     "#b07aa1", "#4d4d4d"};

std::string Escaped(std::string_view text) {
  return absl::StrReplaceAll({text.data(), text.size()},
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

}  // namespace

std::string AnswersAsJson(const Question& question, std::span<const Answer> answers,
                          const Advised& advised) {
  Json json = {
      {"model", JsonOf(question.model)},
      {"machine", Json::parse(ToJson(question.machine))},
      {"ranks", question.ranks},
      {"dtype", Text(Name(question.config.compute))},
      {"optimizer", OptimizerName(question.config)},
      {"optimizer_states", HasStates(question.config)
                               ? kStatesWords[static_cast<int>(question.config.optimizer.states)]
                               : "none"},
      {"context", question.pass.context},
      {"micro_batch_size", question.config.micro_batch_size},
      {"micro_batches", question.config.gradient_accumulation_steps}};
  json["machine"]["name"] = question.machine.name;
  if (advised.largest) {
    json["largest"] = {{"quantity", FactsOf(*advised.largest).word}, {"most", advised.most}};
    for (const auto& [tier, most] : advised.most_of_states)
      json["largest"]["with_states"][Text(Name(tier))] = most;
  }
  if (question.sequences > 0)
    json["step_tokens"] = question.sequences_of_step() * question.pass.context;
  if (question.batch_tokens > 0) json["batch_tokens"] = question.batch_tokens;
  if (question.tokens > 0) json["tokens"] = question.tokens;
  json["activations_of"] = question.pass.compiled               ? "torch-compiled"
                           : question.pass.torch                ? "torch"
                           : question.pass.own_activations >= 0 ? "given"
                                                                : "gpt";
  json["hosts"] = question.hosts();
  json["tensor_widths"] = question.widths;
  json["sequence_parallel"] = question.pass.sequence_parallel;
  if (const std::string other = OtherParallelism(question); !other.empty())
    json["other_parallelism"] = other;
  json["answers"] = Json::array();
  for (const Answer& answer : answers) json["answers"].push_back(JsonOf(question, answer));
  json["chosen"] = nullptr;
  if (advised.chosen != nullptr) {
    json["chosen"] = JsonOf(question, *advised.chosen);
    if (advised.chosen->refused.ok() && HasPeers(question, advised.chosen->choice))
      json["chosen"]["peers"] = JsonOf(PeerEstimates(question, advised.chosen->choice));
    json["config"] = Json::parse(advised.chosen->config.ToJson());
  }
  json["best_change"] = JsonOf(advised.change);
  json["larger_batch"] = JsonOf(advised.larger_batch);
  json["small_states"] = JsonOf(question, advised.small_states);
  for (const Answer& answer : advised.with_small_states)
    json["answers_with_small_states"].push_back(JsonOf(question, answer));
  for (const Answer& answer : advised.over_tensor)
    json["answers_over_tensor"].push_back(JsonOf(question, answer));
  json["remedy"] = advised.remedy.empty() ? Json() : Json(advised.remedy);
  json["best_purchase"] = JsonOf(advised.purchase);
  json["warnings"] = advised.warnings;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string OffersAsJson(const Question& question, std::span<const Offer> offers) {
  Json json = {{"model", question.model.name}, {"offers", Json::array()}};
  if (question.sequences > 0) json["step_tokens"] = question.sequences * question.pass.context;
  const Offer* const cheapest = Cheapest(offers);
  for (const Offer& offer : offers) {
    Json& each = json["offers"].emplace_back();
    each = {{"machine", offer.machine.name}, {"hosts", offer.hosts}};
    if (offer.hosts == 0) {
      each["lacks"] = offer.lacks;
      continue;
    }
    each["answer"] = JsonOf(question, *offer.answer);
    each["config"] = Json::parse(offer.answer->config.ToJson());
    each["is_cheapest"] = &offer == cheapest;
    if (question.tokens > 0) each["hours"] = offer.hours_of(question.tokens);
    if (offer.price_an_hour <= 0) continue;
    each["price_an_hour"] = offer.price_an_hour * offer.hosts;
    each["price_of_1e9_tokens"] = offer.price_of(1e9);
    if (question.tokens > 0) each["price"] = offer.price_of(question.tokens);
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string BarsAsSvg(std::string_view title, std::string_view device,
                      std::span<const MemoryBar> bars) {
  constexpr int kLeft = 360, kWide = 560, kRow = 22;
  std::string heading;
  int legend_at = 22;
  const std::vector<std::string> lines =
      absl::StrSplit(std::string(title), '\n', absl::SkipEmpty());
  for (const std::string& line : lines) {
    absl::StrAppendFormat(&heading, "<text x=\"10\" y=\"%d\" font-size=\"14\">%s</text>\n",
                          legend_at, Escaped(line));
    legend_at += 18;
  }
  const std::string_view names[] = {device, "RAM", "NVMe"};
  std::string rows;
  int y = legend_at + 30;
  for (size_t tier = 0; tier < kTiers; ++tier) {
    double most = 0, room = 0;
    for (const MemoryBar& bar : bars) {
      most = std::max(most, static_cast<double>(bar.held[tier]));
      room = std::max(room, static_cast<double>(bar.room[tier]));
    }
    if (most == 0) continue;
    const double scale = kWide / std::max(most, std::min(room, 2 * most));
    const bool has_line = room > 0 && scale * room <= kWide + 1;
    absl::StrAppendFormat(
        &rows, "<text x=\"10\" y=\"%d\" font-weight=\"bold\">%s of a rank%s%s</text>\n", y + 15,
        std::string(names[tier]),
        room > 0 ? absl::StrCat(", of ", SizeText(static_cast<int64_t>(room))) : "",
        has_line ? " (dashed)" : "");
    y += kRow;
    const int first = y;
    for (const MemoryBar& bar : bars) {
      if (bar.held[tier] == 0) continue;
      absl::StrAppendFormat(&rows, "<text x=\"20\" y=\"%d\">%s</text>\n", y + 15,
                            Escaped(bar.label));
      double x = kLeft;
      for (const MemoryRow& row : bar.memory) {
        if (static_cast<size_t>(row.tier) != tier) continue;
        const double width = scale * static_cast<double>(row.predicted_bytes);
        absl::StrAppendFormat(
            &rows, "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/>\n", x,
            y + 2, width, kRow - 4, kColours[static_cast<int>(row.state)]);
        x += width;
      }
      absl::StrAppendFormat(&rows, "<text x=\"%.1f\" y=\"%d\">%s</text>\n", x + 4, y + 15,
                            SizeText(bar.held[tier]));
      y += kRow;
    }
    if (const double x = kLeft + scale * room; has_line)
      absl::StrAppendFormat(&rows,
                            "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\" stroke=\"black\" "
                            "stroke-dasharray=\"4\"/>\n",
                            x, x, first - 4, y);
    y += kRow / 2;
  }
  std::string legend;
  for (int c = 0; c < kStateClasses; ++c) {
    absl::StrAppendFormat(&legend,
                          "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" fill=\"%s\"/>"
                          "<text x=\"%d\" y=\"%d\">%s</text>\n",
                          10 + c * 104, legend_at, kColours[c], 26 + c * 104, legend_at + 11,
                          std::string(Name(static_cast<StateClass>(c))));
  }
  return absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" "
      "fill=\"white\"/>\n%s%s%s</svg>\n",
      kLeft + kWide + 70, y + 10, heading, legend, rows);
}

std::string AnswersAsSvg(const Question& question, std::span<const Answer* const> answers) {
  std::vector<MemoryBar> bars;
  for (const Answer* answer : answers)
    bars.push_back({WordsOf(*answer), answer->held, answer->room, answer->memory});
  return BarsAsSvg(TitleOf(question), question.machine.is_cpu ? "CPU" : "GPU", bars);
}

}  // namespace ebb::planner
