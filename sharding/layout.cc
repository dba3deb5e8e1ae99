#include "ebb/sharding/layout.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb::sharding {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Elements of the groups of rows that a cut may not split; 0 where cuts may fall anywhere.
int64_t RowBlock(const ParameterSpec& parameter) {
  if (parameter.cut_rows == 0) return 0;
  const int64_t rows = parameter.shape.front();
  return std::min(parameter.cut_rows, rows) * (Elements(parameter.shape) / rows);
}

// The first aligned offset from `offset` at which every cut at a multiple of `shard` falls between
// blocks of the parameter. Moving the start can serve one cut; a parameter that spans several needs
// slices of whole blocks as well.
std::optional<int64_t> PlaceRows(int64_t offset, int64_t elements, int64_t block, int64_t shard,
                                 int64_t alignment) {
  const int64_t step = std::lcm(block, alignment);
  int64_t start = offset;
  // The first try begins before the next cut, the second at it. One at a later cut would end alike.
  for (int tries = 0; tries < 2; ++tries) {
    const int64_t cut = RoundUp(start + 1, shard);
    if (start + elements <= cut) return start;
    const int64_t moved = cut - (cut - start) / step * step;  // whole blocks before the cut
    const bool spans_more = moved + elements > cut + shard;
    if (moved < cut && (!spans_more || shard % block == 0)) return moved;
    start = cut;
  }
  return std::nullopt;
}

// The placement for slices of `shard` elements, or the parameter that does not fit one.
std::optional<Section> PlaceParameters(const ModelSpec& model,
                                       std::span<const ParameterId> parameters, int shards,
                                       int64_t shard, int64_t alignment, ParameterId& obstacle) {
  Section section{.placements = {}, .shard = shard, .elements = shard * shards};
  int64_t end = 0;
  for (ParameterId id : parameters) {
    const int64_t elements = Elements(model[id].shape);
    int64_t offset = RoundUp(end, alignment);
    if (const int64_t block = RowBlock(model[id]); block > 0) {
      const std::optional<int64_t> start = PlaceRows(offset, elements, block, shard, alignment);
      if (!start) {
        obstacle = id;
        return std::nullopt;
      }
      if (*start > offset) obstacle = id;
      offset = *start;
    }
    section.placements.push_back({id, offset, elements});
    end = offset + elements;
  }
  if (end > section.elements) return std::nullopt;
  return section;
}

}  // namespace

absl::StatusOr<Section> Partition(const ModelSpec& model, std::span<const ParameterId> parameters,
                                  int shards, int64_t alignment) {
  if (parameters.empty()) return Section{};
  int64_t total = 0;
  bool has_row_cuts = false;
  for (ParameterId id : parameters) {
    total = RoundUp(total, alignment) + Elements(model[id].shape);
    has_row_cuts |= RowBlock(model[id]) > 0;
  }
  const int64_t shortest = RoundUp((total + shards - 1) / shards, alignment);
  ParameterId obstacle = parameters.front();
  if (!has_row_cuts)
    return *PlaceParameters(model, parameters, shards, shortest, alignment, obstacle);

  const int64_t longest = shortest + shortest / 20;
  // Slices of whole blocks of a parameter, as a parameter over several cuts needs them; then any
  // aligned length.
  std::vector<int64_t> lengths;
  for (ParameterId id : parameters) {
    if (const int64_t block = RowBlock(model[id]); block > 0) {
      const int64_t step = std::lcm(block, alignment);
      int64_t length = RoundUp(shortest, step);
      for (int n = 0; n < 64 && length <= longest; ++n, length += step) lengths.push_back(length);
    }
  }
  for (int64_t n = 0; n < 4096; ++n) lengths.push_back(shortest + n * alignment);
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  for (int64_t shard : lengths) {
    if (shard > longest) break;
    if (std::optional<Section> section =
            PlaceParameters(model, parameters, shards, shard, alignment, obstacle))
      return *std::move(section);
  }
  const ParameterSpec& parameter = model[obstacle];
  return absl::InvalidArgumentError(
      absl::StrCat("parameter '", parameter.name, "': cutting it only at multiples of ",
                   parameter.cut_rows, " rows would pad its unit by more than 5% over ", shards,
                   " ranks; use fewer cut_rows, or give it a unit of its own in which the number "
                   "of row groups is a multiple of the ranks"));
}

absl::StatusOr<ModelLayout> LayOut(const ModelSpec& model, int shards) {
  if (shards < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("a world of ", shards, " ranks: at least 1 is needed"));
  EBB_RETURN_IF_ERROR(Validate(model));
  ModelLayout layout{.shards = shards,
                     .units = {},
                     .parameters = std::vector<ParameterLocation>(model.parameters.size())};
  for (size_t u = 0; u < model.units.size(); ++u) {
    std::vector<ParameterId> trainable, frozen;
    for (ParameterId id : model.units[u].parameters)
      (model[id].trainable ? trainable : frozen).push_back(id);
    UnitLayout unit;
    const int64_t alignment = std::max<int64_t>(kAlignment, model.units[u].state_block);
    EBB_ASSIGN_OR_RETURN(unit.trainable, Partition(model, trainable, shards, alignment));
    EBB_ASSIGN_OR_RETURN(unit.frozen, Partition(model, frozen, shards));
    for (const Section* section : {&unit.trainable, &unit.frozen}) {
      for (const PlacedParameter& placement : section->placements) {
        layout.parameters[static_cast<size_t>(placement.parameter)] = {
            .unit = static_cast<int>(u),
            .trainable = section == &unit.trainable,
            .offset = placement.offset,
            .elements = placement.elements};
      }
    }
    layout.units.push_back(std::move(unit));
  }
  return layout;
}

}  // namespace ebb::sharding
