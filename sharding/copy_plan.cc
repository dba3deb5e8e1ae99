#include "ebb/sharding/copy_plan.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb::sharding {
namespace {

constexpr int64_t kPieceAlignment = 64;  // bytes

// Where a parameter lies in its section, and how the section is cut.
struct Cut {
  int64_t offset = 0, shard = 0;
  int ShardAt(int64_t element) const { return static_cast<int>((offset + element) / shard); }
  // The first element of the parameter that is on a later shard than `element`.
  int64_t EndAt(int64_t element) const { return (ShardAt(element) + 1) * shard - offset; }
};

Cut CutOf(const ModelLayout& layout, const ParameterLocation& location) {
  const UnitLayout& unit = layout.units[location.unit];
  return {.offset = location.offset,
          .shard = location.trainable ? unit.trainable.shard : unit.frozen.shard};
}

DType StoredAs(const CopySide& side, ParameterId p) {
  const ParameterSpec& parameter = (*side.model)[p];
  return parameter.trainable && side.master == DType::kFloat32
             ? DType::kFloat32
             : parameter.compute.value_or(side.compute);
}

std::string ShapeText(const ParameterSpec& parameter) {
  return absl::StrCat("[", absl::StrJoin(WholeShape(parameter), ", "), "]");
}

// Puts transfers into rounds that the staging holds.
class Rounds {
 public:
  Rounds(int world, int64_t bytes_max)
      : bytes_max_(bytes_max),
        sent_(static_cast<size_t>(world)),
        received_(static_cast<size_t>(world)) {}

  void Add(const Transfer& transfer) {
    const int64_t bytes = transfer.staged_bytes();
    if (Sent(transfer) + bytes > bytes_max_ || Received(transfer) + bytes > bytes_max_) Close();
    Sent(transfer) += bytes;
    Received(transfer) += bytes;
    plan_.staging_bytes = std::max({plan_.staging_bytes, Sent(transfer), Received(transfer)});
    round_.push_back(transfer);
  }

  CopyPlan Take() {
    Close();
    return std::move(plan_);
  }

 private:
  int64_t& Sent(const Transfer& transfer) { return sent_[transfer.from]; }
  int64_t& Received(const Transfer& transfer) { return received_[transfer.to]; }

  // By distance, so that ranks do not all begin with the same one. Any order that is the same on
  // every rank is free of circles: of the messages not yet through, both sides of the first are at
  // it.
  void Close() {
    if (round_.empty()) return;
    const int world = static_cast<int>(sent_.size());
    const auto key = [&](const Transfer& t) {
      return std::pair((t.to - t.from + world) % world, t.from);
    };
    std::stable_sort(round_.begin(), round_.end(),
                     [&](const Transfer& a, const Transfer& b) { return key(a) < key(b); });
    plan_.rounds.push_back(std::exchange(round_, {}));
    std::fill(sent_.begin(), sent_.end(), 0);
    std::fill(received_.begin(), received_.end(), 0);
  }

  const int64_t bytes_max_;
  std::vector<int64_t> sent_, received_;  // bytes of this round, by rank
  std::vector<Transfer> round_;
  CopyPlan plan_;
};

}  // namespace

absl::StatusOr<std::vector<ParameterId>> MatchByName(const ModelSpec& source,
                                                     const ModelSpec& destination) {
  std::map<std::string_view, ParameterId> by_name;
  for (size_t p = 0; p < source.parameters.size(); ++p)
    by_name[source.parameters[p].name] = static_cast<ParameterId>(p);
  std::vector<ParameterId> match;
  std::vector<std::string> missing;
  for (const ParameterSpec& parameter : destination.parameters) {
    const auto found = by_name.find(parameter.name);
    if (found == by_name.end()) {
      missing.push_back(absl::StrCat("'", parameter.name, "'"));
      continue;
    }
    const ParameterSpec& other = source[found->second];
    if (WholeShape(other) != WholeShape(parameter)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter '", parameter.name, "' has the shape ", ShapeText(parameter),
          ", and in the source ", ShapeText(other), "; only equal shapes can be copied"));
    }
    if ((other.compute == DType::kInt8) != (parameter.compute == DType::kInt8)) {
      return absl::InvalidArgumentError(absl::StrCat("parameter '", parameter.name,
                                                     "' is bytes on one side and numbers on the ",
                                                     "other; only bytes can be copied into bytes"));
    }
    match.push_back(found->second);
  }
  if (missing.empty()) return match;
  constexpr size_t kNamed = 5;
  const size_t named = std::min(missing.size(), kNamed);
  return absl::InvalidArgumentError(absl::StrCat(
      "the source lacks ", missing.size(), missing.size() == 1 ? " parameter" : " parameters",
      " of the destination: ",
      absl::StrJoin(missing.begin(), missing.begin() + static_cast<int64_t>(named), ", "),
      missing.size() > named ? ", ..." : "", "; names must be the same on both sides"));
}

int64_t Transfer::staged_bytes() const {
  if (from == to) return 0;
  const int64_t bytes = (end - begin) * SizeOf(dtype);
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

absl::StatusOr<CopyPlan> PlanCopy(const CopySide& source, const CopySide& destination, int world,
                                  int64_t staging_bytes_max) {
  EBB_ASSIGN_OR_RETURN(const std::vector<ParameterId> match,
                       MatchByName(*source.model, *destination.model));
  const int64_t bytes_max = std::max(staging_bytes_max, kPieceAlignment);
  const int shards = destination.layout->shards;
  Rounds rounds(world, bytes_max);
  for (size_t q = 0; q < match.size(); ++q) {
    Transfer transfer{.source = match[q], .destination = static_cast<ParameterId>(q)};
    const DType has = StoredAs(source, transfer.source);
    const DType keeps = StoredAs(destination, transfer.destination);
    transfer.dtype = SizeOf(has) <= SizeOf(keeps) ? has : keeps;
    const int64_t piece_max = bytes_max / kPieceAlignment * kPieceAlignment / SizeOf(has);
    const ParameterLocation& location = destination.layout->parameters[q];
    const Cut to = CutOf(*destination.layout, location);
    const Cut from =
        CutOf(*source.layout, source.layout->parameters[static_cast<size_t>(transfer.source)]);
    for (int64_t at = 0; at < location.elements; at = transfer.end) {
      transfer.begin = at;
      transfer.end = std::min({location.elements, to.EndAt(at), from.EndAt(at), at + piece_max});
      for (int first = 0; first < world; first += shards) {
        transfer.to = first + to.ShardAt(at);
        const int group = transfer.to / source.layout->shards;
        transfer.from = group * source.layout->shards + from.ShardAt(at);
        rounds.Add(transfer);
      }
    }
  }
  return rounds.Take();
}

}  // namespace ebb::sharding
