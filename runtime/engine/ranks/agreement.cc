#include "ebb/runtime/engine/ranks/agreement.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/interval.h"

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

absl::Status Differs(const HostLane& lane, int rank, absl::string_view what,
                     absl::string_view detail) {
  return absl::FailedPreconditionError(
      absl::StrCat("ranks create different engines: the ", what, " of ", lane.world.RankName(rank),
                   " differs from ", lane.world.RankName(0), "'s", detail));
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
  EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> counts,
                       AllValues(lane, static_cast<int64_t>(values.size())));
  const size_t longest = static_cast<size_t>(*std::max_element(counts.begin(), counts.end()));
  std::vector<std::vector<int64_t>> lists(counts.size());
  if (longest == 0) return lists;
  std::vector<int64_t> own(values.begin(), values.end()), all(longest * counts.size());
  own.resize(longest);
  EBB_RETURN_IF_ERROR(
      GatherBytes(lane, std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all))));
  for (size_t r = 0; r < counts.size(); ++r) {
    const auto begin = all.begin() + static_cast<int64_t>(r * longest);
    lists[r].assign(begin, begin + counts[r]);
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

// An optimizer of the trainer's: whether there is one, and the names of its states.
absl::Status AgreeOnOptimizer(const HostLane& lane, const OptimizerSpec* own) {
  std::vector<int64_t> states = {own != nullptr ? 1 : 0};
  for (size_t k = 0; own != nullptr && k < own->states.size(); ++k)
    states.push_back(static_cast<int64_t>(sharding::Hasher().Add(own->states[k]).hash()));
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all, AllLists(lane, states));
  const Difference at = FirstDifference(all);
  if (at.rank == 0) return absl::OkStatus();
  const std::vector<int64_t>&first = all.front(), &other = all[static_cast<size_t>(at.rank)];
  constexpr absl::string_view kOptimizer = "optimizer";
  if (at.index == 0) {
    return Differs(lane, at.rank, kOptimizer,
                   absl::StrCat(": only ", lane.world.RankName(first[0] == 1 ? 0 : at.rank),
                                " gives EngineOptions::optimizer"));
  }
  const std::string name =
      at.index < states.size() ? absl::StrCat(" ('", own->states[at.index - 1], "' here)") : "";
  return Differs(lane, at.rank, kOptimizer,
                 absl::StrCat(": first at state ", at.index - 1, name, ", of ", first.size() - 1,
                              " on ", lane.world.RankName(0), " and ", other.size() - 1, " on ",
                              lane.world.RankName(at.rank)));
}

// Behind the comparison of all that plans follow from.
absl::Status AgreeOnFingerprint(const HostLane& lane, uint64_t plans, absl::string_view of_same) {
  EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                       AllValues(lane, static_cast<int64_t>(plans)));
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] != all[0])
      return Differs(lane, static_cast<int>(r), "plan",
                     absl::StrCat(" for the same ", of_same, ": another version of Ebb"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AgreeOnPlans(const HostLane& lane, const EngineInputs& inputs, uint64_t plans) {
  const ModelSpec& model = inputs.model;
  std::vector<int64_t> parameters;
  for (const ParameterSpec& parameter : model.parameters) {
    parameters.push_back(static_cast<int64_t>(sharding::Fingerprint(parameter)));
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all, AllLists(lane, parameters));
  if (const Difference at = FirstDifference(all); at.rank > 0) {
    const std::string name = at.index < model.parameters.size()
                                 ? absl::StrCat(" ('", model.parameters[at.index].name, "' here)")
                                 : "";
    return Differs(
        lane, at.rank, "model",
        absl::StrCat(": first at parameter ", at.index, name, ", of ", all[0].size(), " on ",
                     lane.world.RankName(0), " and ", all[static_cast<size_t>(at.rank)].size(),
                     " on ", lane.world.RankName(at.rank)));
  }
  // How a rank reaches its host's disk changes nothing for the others.
  Config compared = inputs.config;
  compared.ebb.io_backend = IoBackend::kAuto;
  const std::vector<std::string> config_lines = absl::StrSplit(compared.ToJson(), '\n');
  std::vector<int64_t> line_hashes;
  for (const std::string& line : config_lines)
    line_hashes.push_back(static_cast<int64_t>(sharding::Hasher().Add(line).hash()));
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> configs,
                       AllLists(lane, line_hashes));
  if (const Difference at = FirstDifference(configs); at.rank > 0) {
    return Differs(lane, at.rank, "config",
                   absl::StrCat(": first at ", DescribeLine(config_lines, at.index), " here"));
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> models,
                       AllValues(lane, static_cast<int64_t>(sharding::Fingerprint(model))));
  for (size_t r = 1; r < models.size(); ++r) {
    if (models[r] != models[0])
      return Differs(lane, static_cast<int>(r), "model",
                     ": the same parameters in other units, visits, order of scopes or workspace");
  }
  EBB_RETURN_IF_ERROR(AgreeOnOptimizer(lane, inputs.own_optimizer()));
  return AgreeOnFingerprint(lane, plans, "model and config");
}

namespace {

// A visit is two numbers, an event of ModelSpec::order one: `Describe` undoes it, of any rank.
class OrderNumbers {
 public:
  static std::vector<int64_t> Of(const ModelSpec& model) {
    std::vector<int64_t> numbers = {std::ssize(model.forward)};
    for (const Visit& visit : model.forward) {
      numbers.push_back(8 * static_cast<int64_t>(visit.unit) + (visit.forward ? 1 : 0) +
                        (visit.backward ? 2 : 0) + (visit.gradients ? 4 : 0));
      numbers.push_back(visit.output_bytes);
    }
    for (const ScopeEvent& event : model.order) {
      numbers.push_back(8 * int64_t{event.visit} + (event.opens ? 1 : 0) +
                        (event.backward ? 2 : 0) + (event.recompute ? 4 : 0));
    }
    return numbers;
  }

  OrderNumbers(const ModelSpec& model, std::span<const int64_t> numbers)
      : model_(model), numbers_(numbers) {}

  // The place in the order that number `index` describes.
  std::string Place(size_t index) const {
    if (index == 0) return "the number of visits";
    if (index > visits() * 2) return absl::StrCat("event ", index - 1 - 2 * visits());
    return absl::StrCat("visit ", (index - 1) / 2);
  }
  std::string Describe(size_t index) const {
    if (index >= numbers_.size()) return "the end";
    const int64_t number = numbers_[index];
    if (index == 0) return absl::StrCat(number);
    if (index > visits() * 2) {
      const int64_t unit = numbers_[static_cast<size_t>(1 + 2 * (number / 8))] / 8;
      return absl::StrCat((number & 2) != 0   ? "Backward"
                          : (number & 4) != 0 ? "Recompute"
                                              : "Forward",
                          " of unit '", NameOf(unit), "' ", (number & 1) != 0 ? "opens" : "closes");
    }
    if (index % 2 == 0) return absl::StrCat(number, " bytes of output");
    std::vector<const char*> parts;
    if ((number & 1) == 0) parts.push_back("no forward");
    if ((number & 2) == 0) parts.push_back("no backward");
    if ((number & 4) == 0) parts.push_back("no gradients");
    return absl::StrCat("unit '", NameOf(number / 8), "'", parts.empty() ? "" : " with ",
                        absl::StrJoin(parts, " and "));
  }

 private:
  size_t visits() const { return static_cast<size_t>(numbers_.front()); }
  const std::string& NameOf(int64_t unit) const {
    return model_.units[static_cast<size_t>(unit)].name;
  }

  const ModelSpec& model_;
  std::span<const int64_t> numbers_;
};

}  // namespace

absl::Status AgreeOnOrder(const HostLane& lane, const ModelSpec& model, uint64_t plans) {
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all,
                       AllLists(lane, OrderNumbers::Of(model)));
  if (const Difference at = FirstDifference(all); at.rank > 0) {
    const OrderNumbers first(model, all.front()), other(model, all[static_cast<size_t>(at.rank)]);
    const std::string name = lane.world.RankName(at.rank);
    return absl::FailedPreconditionError(absl::StrCat(
        "Reorder: the order of ", name, " differs from ", lane.world.RankName(0), "'s: first at ",
        first.Place(at.index), ", ", first.Describe(at.index), " on ", lane.world.RankName(0),
        " and ", other.Describe(at.index), " on ", name, "; every rank must ask for the same"));
  }
  return AgreeOnFingerprint(lane, plans, "order");
}

absl::Status AgreeOnInitialValues(const HostLane& lane, const ModelSpec& model, bool of_rank_0) {
  std::vector<int64_t> hashes = {of_rank_0};
  absl::Status own;
  for (size_t p = 0; p < model.parameters.size() && !of_rank_0; ++p) {
    const ParameterSpec& parameter = model.parameters[p];
    float first[4] = {};
    const int64_t count = std::min<int64_t>(std::ssize(first), Elements(parameter.shape));
    const absl::Status filled =
        parameter.init(sharding::SliceOf(model, static_cast<ParameterId>(p), 0, count),
                       std::span(first).first(static_cast<size_t>(count)));
    if (own.ok() && !filled.ok()) {
      own = absl::Status(filled.code(), absl::StrCat("initial values of parameter '",
                                                     parameter.name, "': ", filled.message()));
    }
    sharding::Hasher hasher;
    for (float value : first) hasher.Add(int64_t{std::bit_cast<uint32_t>(value)});
    hashes.push_back(static_cast<int64_t>(hasher.hash()));
  }
  EBB_RETURN_IF_ERROR(AgreeOnStatus(lane, own));
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all, AllLists(lane, hashes));
  if (const Difference at = FirstDifference(all); at.rank > 0) {
    if (at.index == 0) {
      return Differs(lane, at.rank, "EngineOptions::initial_values_of_rank_0", "");
    }
    return Differs(lane, at.rank, "initial value",
                   absl::StrCat(" of parameter '", model.parameters[at.index - 1].name,
                                "': an initialiser must be the same function on every rank, also "
                                "its seed"));
  }
  return absl::OkStatus();
}

}  // namespace ebb
