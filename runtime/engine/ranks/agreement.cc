#include "ebb/runtime/engine/ranks/agreement.h"

#include <algorithm>
#include <bit>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/split.h"

namespace ebb {
namespace {

// All-gather of `own.size()` bytes from each rank; the sizes are the same.
absl::Status GatherBytes(const HostLane& lane, std::span<const std::byte> own,
                         std::span<std::byte> all) {
  const int64_t ranks = lane.communicator.size(), bytes = std::ssize(own);
  const int64_t piece = lane.mirror.Fitting(bytes, ranks);
  for (int64_t begin = 0; begin < bytes; begin += piece) {
    const int64_t count = std::min(piece, bytes - begin);
    const CollectiveSpan span{.send = lane.mirror.Of(own.data(), 0),
                              .receive = lane.mirror.Of(all.data(), piece),
                              .count = count};
    lane.mirror.Upload(lane.stream, own.data() + begin, 0, count);
    if (const absl::Status called =
            lane.communicator.AllGather(lane.stream, {&span, 1}, DType::kInt8);
        !called.ok()) {
      lane.communicator.Abort(called);  // every rank comes to the collective, or none waits for it
      return called;
    }
    lane.mirror.Download(lane.stream, piece, ranks * count);
    lane.stream.WaitIdle();  // until then the communicator borrows `span`
    for (int64_t rank = 0; rank < ranks; ++rank)
      lane.mirror.Take(all.data() + rank * bytes + begin, piece + rank * count, count);
  }
  return lane.communicator.status();
}

// A rank with an error of its own needs nothing else.
template <class Value>
absl::StatusOr<Value> OrOwn(const absl::Status& own, absl::StatusOr<Value> gathered) {
  if (!own.ok() && !gathered.ok()) return own;
  return gathered;
}

// Every rank's, by rank; of errors the whole message.
absl::StatusOr<std::vector<absl::Status>> AllStatuses(const HostLane& lane,
                                                      const absl::Status& own) {
  EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> codes,
                       AllValues(lane, static_cast<int64_t>(own.code())));
  std::vector<absl::Status> all(codes.size());
  constexpr auto kOk = static_cast<int64_t>(absl::StatusCode::kOk);
  if (std::count(codes.begin(), codes.end(), kOk) == std::ssize(codes)) return all;
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> messages,
                       AllTexts(lane, std::string(own.message())));
  for (size_t r = 0; r < all.size(); ++r)
    all[r] = absl::Status(static_cast<absl::StatusCode>(codes[r]), messages[r]);
  return all;
}

std::vector<absl::Status>::const_iterator FirstFailed(const std::vector<absl::Status>& all) {
  return std::find_if(all.begin(), all.end(), [](const absl::Status& one) { return !one.ok(); });
}

// This rank's result from all ranks' statuses.
absl::Status SeenHere(const HostLane& lane, const std::vector<absl::Status>& all) {
  const absl::Status& own = all[static_cast<size_t>(lane.communicator.rank())];
  const auto failed = FirstFailed(all);
  if (failed == all.end() || !own.ok()) return own;
  return OfRank(lane.world.RankName(static_cast<int>(failed - all.begin())), *failed);
}

struct Difference {
  int rank = 0;  // 0: there is no difference
  size_t index = 0;
};

// The first rank with another list than rank 0, and where the two differ.
Difference FirstDifference(const std::vector<std::vector<int64_t>>& lists) {
  const std::vector<int64_t>& first = lists.front();
  for (size_t r = 1; r < lists.size(); ++r) {
    const auto [mine, theirs] =
        std::mismatch(first.begin(), first.end(), lists[r].begin(), lists[r].end());
    if (mine == first.end() && theirs == lists[r].end()) continue;
    return {.rank = static_cast<int>(r), .index = static_cast<size_t>(mine - first.begin())};
  }
  return {};
}

// A line of indented JSON with the keys of the objects that it is in: `bf16.enabled: true`.
std::string DescribeLine(const std::vector<std::string>& lines, size_t index) {
  if (index >= lines.size()) return "the end";
  const auto indent = [&](size_t line) { return lines[line].find_first_not_of(' '); };
  const auto text = [&](size_t line) {
    return absl::StrReplaceAll(absl::StripAsciiWhitespace(lines[line]),
                               {{"\"", ""}, {",", ""}, {": {", "."}});
  };
  std::string described = text(index);
  size_t inside = indent(index);
  for (size_t line = index; line-- > 1;) {
    if (indent(line) >= inside) continue;
    inside = indent(line);
    described = text(line) + described;
  }
  return described;
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> AllValues(const HostLane& lane, int64_t value) {
  std::vector<int64_t> all(static_cast<size_t>(lane.communicator.size()));
  EBB_RETURN_IF_ERROR(GatherBytes(lane, std::as_bytes(std::span(&value, 1)),
                                  std::as_writable_bytes(std::span(all))));
  return all;
}

absl::StatusOr<std::vector<std::string>> AllTexts(const HostLane& lane, std::string_view text) {
  EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes,
                       AllValues(lane, static_cast<int64_t>(text.size())));
  const size_t longest = static_cast<size_t>(*std::max_element(sizes.begin(), sizes.end()));
  std::string own(text), all(longest * sizes.size(), '\0');
  own.resize(longest);
  EBB_RETURN_IF_ERROR(
      GatherBytes(lane, std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all))));
  std::vector<std::string> texts;
  for (size_t r = 0; r < sizes.size(); ++r)
    texts.push_back(all.substr(r * longest, static_cast<size_t>(sizes[r])));
  return texts;
}

absl::StatusOr<std::vector<std::vector<int64_t>>> AllLists(const HostLane& lane,
                                                           std::span<const int64_t> values) {
  EBB_ASSIGN_OR_RETURN(
      const std::vector<std::string> texts,
      AllTexts(lane, {reinterpret_cast<const char*>(values.data()), values.size_bytes()}));
  std::vector<std::vector<int64_t>> lists;
  for (const std::string& text : texts) {
    std::vector<int64_t>& list = lists.emplace_back(text.size() / sizeof(int64_t));
    std::copy(text.begin(), text.end(), reinterpret_cast<char*>(list.data()));
  }
  return lists;
}

absl::Status GatherRecords(const HostLane& lane, const ExchangeRecord& own,
                           std::span<ExchangeRecord> all) {
  return GatherBytes(lane, std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(all));
}

absl::Status AgreeOnStatus(const HostLane& lane, const absl::Status& own) {
  EBB_ASSIGN_OR_RETURN(const std::vector<absl::Status> all, OrOwn(own, AllStatuses(lane, own)));
  return SeenHere(lane, all);
}

absl::Status AgreeOnStatus(const HostLane& lane, const absl::Status& own, int64_t cause,
                           absl::FunctionRef<std::string()> advise) {
  EBB_ASSIGN_OR_RETURN(std::vector<absl::Status> all, OrOwn(own, AllStatuses(lane, own)));
  const size_t rank = static_cast<size_t>(lane.communicator.rank());
  if (FirstFailed(all) == all.end()) return absl::OkStatus();
  const absl::StatusOr<std::vector<int64_t>> causes = AllValues(lane, own.ok() ? 0 : cause);
  if (!causes.ok()) return SeenHere(lane, all);
  std::vector<size_t> advisers;  // by rank: the rank that gives it the error
  for (size_t r = 0; r < all.size(); ++r) {
    const auto first = std::find(causes->begin(), causes->end(), (*causes)[r]);
    advisers.push_back((*causes)[r] == 0 ? r : static_cast<size_t>(first - causes->begin()));
  }
  if ((*causes)[rank] != 0 && advisers[rank] == rank)
    all[rank] = absl::Status(own.code(), absl::StrCat(own.message(), "; ", advise()));
  const absl::StatusOr<std::vector<std::string>> texts =
      AllTexts(lane, std::string(all[rank].message()));
  for (size_t r = 0; texts.ok() && r < all.size(); ++r)
    all[r] = absl::Status(all[advisers[r]].code(), (*texts)[advisers[r]]);
  return SeenHere(lane, all);
}

namespace {

// A part of what ranks must have alike: in words, and the hash of what the words leave out.
struct Fact {
  std::string text;
  uint64_t hash = 0;
};

// Names the first fact that a rank has otherwise than rank 0. `subject`: "Reorder: the order".
absl::Status AgreeOnFacts(const HostLane& lane, absl::string_view subject,
                          std::span<const Fact> facts) {
  std::vector<int64_t> hashes;
  for (const auto& [text, hash] : facts) {
    hashes.push_back(
        static_cast<int64_t>(sharding::Hasher().Add(text).Add(static_cast<int64_t>(hash)).hash()));
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all, AllLists(lane, hashes));
  const Difference at = FirstDifference(all);
  if (at.rank == 0) return absl::OkStatus();
  EBB_ASSIGN_OR_RETURN(
      const std::vector<std::string> texts,
      AllTexts(lane, at.index < facts.size() ? facts[at.index].text
                                             : absl::StrCat("the end (after ", facts.size(), ")")));
  const std::string &first = texts.front(), &other = texts[static_cast<size_t>(at.rank)],
                    zero = lane.world.RankName(0), rank = lane.world.RankName(at.rank);
  return absl::FailedPreconditionError(
      absl::StrCat(subject, " of ", rank, " differs from ", zero, "'s: first at ", first,
                   first == other ? "" : absl::StrCat(" on ", zero, " and ", other, " on ", rank),
                   "; every rank must give the same"));
}

absl::Status AgreeOnCreated(const HostLane& lane, absl::string_view what,
                            std::span<const Fact> facts) {
  return AgreeOnFacts(lane, absl::StrCat("ranks create different engines: the ", what), facts);
}

std::vector<Fact> FactsOf(const Config& config) {
  // How a rank reaches its host's disk changes nothing for the others.
  Config compared = config;
  compared.ebb.io_backend = IoBackend::kAuto;
  const std::vector<std::string> lines = absl::StrSplit(compared.ToJson(), '\n');
  std::vector<Fact> facts;
  for (size_t line = 0; line < lines.size(); ++line) facts.push_back({DescribeLine(lines, line)});
  return facts;
}

// `own`: null: there is none of the trainer's.
std::vector<Fact> FactsOf(const OptimizerSpec* own) {
  if (own == nullptr) return {{"EngineOptions::optimizer (not given)"}};
  std::vector<Fact> facts = {{"EngineOptions::optimizer (given)"}};
  for (const std::string& state : own->states)
    facts.push_back({absl::StrCat("state ", facts.size() - 1, " ('", state, "')")});
  return facts;
}

std::vector<Fact> OrderOf(const ModelSpec& model) {
  std::vector<Fact> facts = {{absl::StrCat("the number of visits (", model.forward.size(), ")")}};
  for (size_t v = 0; v < model.forward.size(); ++v) {
    const Visit& visit = model.forward[v];
    facts.push_back({absl::StrCat("visit ", v, " (unit '", model[visit.unit].name, "'",
                                  visit.forward ? "" : " without forward",
                                  visit.backward ? "" : " without backward",
                                  visit.gradients ? "" : " without gradients", ")")});
    facts.push_back({absl::StrCat("visit ", v, " (", visit.output_bytes, " bytes of output)")});
  }
  for (size_t e = 0; e < model.order.size(); ++e) {
    const ScopeEvent& event = model.order[e];
    const char* const name = event.backward    ? "Backward"
                             : event.recompute ? "Recompute"
                                               : "Forward";
    const UnitId unit = model.forward[static_cast<size_t>(event.visit)].unit;
    facts.push_back({absl::StrCat("event ", e, " (", name, " of unit '", model[unit].name, "' ",
                                  event.opens ? "opens" : "closes", ")"),
                     static_cast<uint64_t>(event.visit)});
  }
  return facts;
}

}  // namespace

absl::Status AgreeOnPlans(const HostLane& lane, const EngineInputs& inputs, uint64_t plans) {
  std::vector<Fact> parameters;
  for (const ParameterSpec& parameter : inputs.model.parameters) {
    parameters.push_back(
        {absl::StrCat("parameter ", parameters.size(), " ('", parameter.name, "')"),
         sharding::Fingerprint(parameter)});
  }
  const Fact model = {"the units, visits, order of scopes or workspace of the same parameters",
                      sharding::Fingerprint(inputs.model)},
             plan = {"what the same model and config become: another version of Ebb", plans};
  EBB_RETURN_IF_ERROR(AgreeOnCreated(lane, "model", parameters));
  EBB_RETURN_IF_ERROR(AgreeOnCreated(lane, "config", FactsOf(inputs.config)));
  EBB_RETURN_IF_ERROR(AgreeOnCreated(lane, "model", {&model, 1}));
  EBB_RETURN_IF_ERROR(AgreeOnCreated(lane, "optimizer", FactsOf(inputs.own_optimizer())));
  return AgreeOnCreated(lane, "plan", {&plan, 1});
}

absl::Status AgreeOnOrder(const HostLane& lane, const ModelSpec& model, uint64_t plans) {
  const Fact plan = {"what the same order becomes: another version of Ebb", plans};
  EBB_RETURN_IF_ERROR(AgreeOnFacts(lane, "Reorder: the order", OrderOf(model)));
  return AgreeOnFacts(lane, "Reorder: the plan", {&plan, 1});
}

namespace {

// Ranks with the same blocks are compared, because an initialiser may know no other block. `hashes`:
// of the parameters with these numbers.
absl::Status AgreeOnBlocks(const HostLane& lane, const ModelSpec& model,
                           std::span<const size_t> parameters, std::span<const int64_t> hashes) {
  if (parameters.empty()) return absl::OkStatus();
  const auto ranks = static_cast<size_t>(model.parameters[parameters.front()].block->ranks);
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all, AllLists(lane, hashes));
  for (size_t r = ranks; r < all.size(); ++r) {
    const auto [own, first] = std::ranges::mismatch(all[r], all[r % ranks]);
    if (own == all[r].end()) continue;
    const size_t at = parameters[own - all[r].begin()];
    return absl::FailedPreconditionError(absl::StrCat(
        "ranks create different engines: the initial value of ",
        lane.world.RankName(static_cast<int>(r)), " differs from ",
        lane.world.RankName(static_cast<int>(r % ranks)), "'s: first at the same block of '",
        model.parameters[at].name, "'; every data rank must give the same"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AgreeOnInitialValues(const HostLane& lane, const ModelSpec& model, bool of_rank_0) {
  std::vector<size_t> blocks;  // parameters with one, and hashes of its first values
  std::vector<int64_t> of_blocks;
  std::vector<Fact> facts = {
      {absl::StrCat("EngineOptions::initial_values_of_rank_0 (", of_rank_0 ? "true)" : "false)")}};
  absl::Status own;
  for (size_t p = 0; p < model.parameters.size() && !of_rank_0; ++p) {
    const ParameterSpec& parameter = model.parameters[p];
    float first[4] = {};
    const int64_t count = std::min<int64_t>(std::ssize(first), Elements(ShownShape(parameter)));
    // This rank's block, where there is one: its initialiser may know no more.
    const absl::Status filled = ForEachSlice(
        model, static_cast<ParameterId>(p), 0, count, [&](const Slice& slice, int64_t local) {
          return parameter.init(
              slice, std::span(first).subspan(static_cast<size_t>(local),
                                              static_cast<size_t>(slice.end - slice.begin)));
        });
    if (own.ok() && !filled.ok()) {
      own = absl::Status(filled.code(), absl::StrCat("initial values of parameter '",
                                                     parameter.name, "': ", filled.message()));
    }
    sharding::Hasher hasher;
    for (float value : first) hasher.Add(int64_t{std::bit_cast<uint32_t>(value)});
    if (parameter.block) {
      blocks.push_back(p);
      of_blocks.push_back(static_cast<int64_t>(hasher.hash()));
      continue;
    }
    facts.push_back({absl::StrCat("parameter '", parameter.name,
                                  "': an initialiser must be the same function on every rank, also "
                                  "its seed"),
                     hasher.hash()});
  }
  EBB_RETURN_IF_ERROR(AgreeOnStatus(lane, own));
  EBB_RETURN_IF_ERROR(AgreeOnCreated(lane, "initial value", facts));
  return AgreeOnBlocks(lane, model, blocks, of_blocks);
}

namespace {

// Where rank `rank` of `part` is in `whole`; -1: nowhere.
int RankIn(const World& whole, const World& part, int rank) {
  const auto number = [](const World& world, int r) {
    const std::vector<int>& numbers = world.backend()->me().world_ranks;
    return numbers.empty() ? r : numbers[r];
  };
  for (int r = 0; r < whole.size(); ++r)
    if (number(whole, r) == number(part, rank)) return r;
  return -1;
}

absl::Status CheckIsPart(const World& whole, const World& part) {
  for (int r = 0; r < part.size(); ++r) {
    if (RankIn(whole, part, r) >= 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("EngineOptions::verdict lacks ", part.RankName(r),
                     " of the engine's world; give it the ranks of all parts of the model"));
  }
  return absl::OkStatus();
}

// Parts of a model have these alike: all of parameters that are whole over tensor, and all but the
// shape of the others.
std::vector<Fact> FactsOfParts(const ModelSpec& model) {
  std::vector<Fact> facts;
  for (const ParameterSpec& parameter : model.parameters) {
    ParameterSpec compared = parameter;
    if (parameter.over_tensor != OverTensor::kWhole) compared.shape.clear();
    facts.push_back({absl::StrCat("parameter ", facts.size(), " ('", parameter.name, "')"),
                     sharding::Fingerprint(compared)});
  }
  for (const UnitSpec& unit : model.units) {
    sharding::Hasher hasher;
    for (const ParameterId id : unit.parameters) hasher.Add(static_cast<int64_t>(id));
    facts.push_back({absl::StrCat("unit '", unit.name, "'"), hasher.hash()});
  }
  return facts;
}

}  // namespace

absl::Status AgreeThatVerdictIsGiven(const HostLane& lane, const std::optional<World>& verdict) {
  const Fact given = {absl::StrCat(
      "EngineOptions::verdict (",
      verdict.has_value() ? absl::StrCat("of ", verdict->size(), " ranks)") : "not given)")};
  return AgreeOnCreated(lane, "verdict", {&given, 1});
}

absl::StatusOr<VerdictRanks> AgreeOnVerdict(const HostLane& lane, const EngineInputs& inputs,
                                            const Config& given, const absl::Status& planned) {
  const World &whole = lane.world, &part = inputs.data_world;
  EBB_RETURN_IF_ERROR(AgreeOnStatus(lane, planned.ok() ? CheckIsPart(whole, part) : planned));
  // By rank of the verdict: the first rank of its part, and its number in the part.
  const int64_t own[] = {RankIn(whole, part, 0), part.rank(), part.size()};
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all, AllLists(lane, own));
  std::vector<int64_t> parts;
  for (const std::vector<int64_t>& each : all) {
    if (each[1] == 0) parts.push_back(each[0]);
    if (each[2] == all.front()[2]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the parts of EngineOptions::verdict have different numbers of ranks, ",
                     all.front()[2], " and ", each[2], "; give every part the same number"));
  }
  EBB_RETURN_IF_ERROR(AgreeOnCreated(lane, "config", FactsOf(given)));
  EBB_RETURN_IF_ERROR(AgreeOnCreated(lane, "model", FactsOfParts(inputs.model)));
  EBB_RETURN_IF_ERROR(AgreeOnCreated(lane, "order", OrderOf(inputs.model)));
  EBB_RETURN_IF_ERROR(AgreeOnCreated(lane, "optimizer", FactsOf(inputs.own_optimizer())));
  ModelSpec replicated;
  for (const ParameterSpec& parameter : inputs.model.parameters)
    if (parameter.over_tensor == OverTensor::kWhole) replicated.parameters.push_back(parameter);
  EBB_RETURN_IF_ERROR(
      AgreeOnInitialValues(lane, replicated, inputs.options.initial_values_of_rank_0));

  Config config = given;
  config.ebb.mesh.tensor = std::ssize(parts);
  VerdictRanks ranks{.mesh = MeshOf(config, whole.size())};
  ranks.ranks.resize(all.size());
  for (int r = 0; r < whole.size(); ++r) {
    const std::vector<int64_t>& of = all[r];
    const auto tensor = std::lower_bound(parts.begin(), parts.end(), of[0]) - parts.begin();
    const int data = ranks.mesh.with(0, kDataAxes, static_cast<int>(of[1])),
              number = ranks.mesh.with(data, Axis::kTensor, static_cast<int>(tensor));
    ranks.ranks[number] = r;
    if (r == whole.rank()) ranks.own = number;
  }
  return ranks;
}

absl::Status AgreeOnReplicas(const HostLane& lane, const VerdictRanks& ranks,
                             const ModelSpec& model, std::span<const int64_t> filled) {
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all, AllLists(lane, filled));
  for (int n = 0; n < std::ssize(ranks.ranks); ++n) {
    const int first = ranks.ranks[ranks.mesh.with(n, Axis::kTensor, 0)], other = ranks.ranks[n];
    const auto [its, others] =
        std::mismatch(all[first].begin(), all[first].end(), all[other].begin(), all[other].end());
    if (its == all[first].end() || others == all[other].end()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the initial values of parameter '", model.parameters[its - all[first].begin()].name,
        "' differ between ", lane.world.RankName(first), " and ", lane.world.RankName(other),
        "; it is whole over tensor (OverTensor::kWhole), so every tensor rank must begin with the "
        "same values"));
  }
  return absl::OkStatus();
}

}  // namespace ebb
