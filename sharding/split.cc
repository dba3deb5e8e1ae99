#include "ebb/sharding/split.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/interval.h"

namespace ebb {
namespace {

// Indices [begin, end) of the cut dimension, which a rank has from `local` on.
struct Range {
  int64_t begin = 0, end = 0, local = 0;
  int rank = 0;
};

std::vector<int64_t> PartsOf(int64_t size, const Split& split) {
  return split.parts.empty() ? std::vector<int64_t>{size} : split.parts;
}

// In the order of the rank's block.
std::vector<Range> RangesOf(int64_t size, const Split& split, int rank, int ranks) {
  if (!split.sizes.empty()) {
    const int64_t begin =
        std::accumulate(split.sizes.begin(), split.sizes.begin() + rank, int64_t{0});
    return {{.begin = begin, .end = begin + split.sizes[rank], .rank = rank}};
  }
  std::vector<Range> ranges;
  int64_t part_begin = 0, local = 0;
  for (const int64_t part : PartsOf(size, split)) {
    const int64_t multiples = part / split.multiple, each = multiples / ranks,
                  more = multiples % ranks;
    const int64_t first = rank * each + std::min<int64_t>(rank, more),
                  count = each + (rank < more ? 1 : 0);
    const int64_t begin = part_begin + first * split.multiple;
    ranges.push_back(
        {.begin = begin, .end = begin + count * split.multiple, .local = local, .rank = rank});
    local += count * split.multiple;
    part_begin += part;
  }
  return ranges;
}

// A whole shape around its cut dimension.
struct Around {
  Around(std::span<const int64_t> shape, const Split& split)
      : size(shape[split.dimension]),
        inner(Elements(shape.subspan(static_cast<size_t>(split.dimension) + 1))) {}
  int64_t size, inner;
};

}  // namespace

absl::Status CheckSplit(const ParameterSpec& parameter) {
  const Split& split = *parameter.split;
  const std::string shape = absl::StrCat("its shape [", absl::StrJoin(parameter.shape, ", "), "]");
  if (split.dimension < 0 || split.dimension >= std::ssize(parameter.shape)) {
    return absl::InvalidArgumentError(
        absl::StrCat("split.dimension is ", split.dimension, ", which ", shape, " does not have"));
  }
  const int64_t size = parameter.shape[split.dimension];
  for (const auto& [name, sizes] : {std::pair("parts", &split.parts), {"sizes", &split.sizes}}) {
    const int64_t sum = std::accumulate(sizes->begin(), sizes->end(), int64_t{0});
    const bool negative =
        std::any_of(sizes->begin(), sizes->end(), [](int64_t n) { return n < 0; });
    if (sizes->empty() || (sum == size && !negative)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("split.", name, " are ", absl::StrJoin(*sizes, ", "), ", which are ", sum,
                     " in all; dimension ", split.dimension, " of ", shape, " is ", size));
  }
  if (split.sizes.empty()) {
    const std::vector<int64_t> parts = PartsOf(size, split);
    const auto uneven = std::find_if(parts.begin(), parts.end(), [&](int64_t part) {
      return split.multiple < 1 || part % split.multiple != 0;
    });
    if (uneven != parts.end())
      return absl::InvalidArgumentError(absl::StrCat("split.multiple is ", split.multiple,
                                                     ", which does not divide the size ", *uneven,
                                                     " of a part"));
  } else if (!split.parts.empty() || split.multiple != 1) {
    return absl::InvalidArgumentError(
        "split.sizes says which rank has what: leave out split.parts and split.multiple");
  }
  if (parameter.over_tensor != OverTensor::kUnsaid) {
    return absl::InvalidArgumentError(
        "split cuts it over the tensor ranks, so leave out over_tensor");
  }
  if (parameter.cut_rows > 0 && split.dimension != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cut_rows is ", parameter.cut_rows,
                                                   ", but split.dimension ", split.dimension,
                                                   " cuts its rows: set cut_rows to 0"));
  }
  return absl::OkStatus();
}

absl::Status CheckSplit(const ParameterSpec& parameter, int tensor_ranks) {
  EBB_RETURN_IF_ERROR(CheckSplit(parameter));
  const Split& split = *parameter.split;
  if (!split.sizes.empty()) {
    if (std::ssize(split.sizes) == tensor_ranks) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("split.sizes has ", split.sizes.size(),
                                                   " sizes for ", tensor_ranks, " tensor ranks"));
  }
  const std::vector<int64_t> parts = PartsOf(parameter.shape[split.dimension], split);
  for (size_t p = 0; p < parts.size(); ++p) {
    const int64_t blocks = parts[p] / split.multiple;
    if (blocks >= tensor_ranks) continue;
    const std::string of_part = parts.size() > 1
                                    ? absl::StrCat("part ", p, " of dimension ", split.dimension)
                                    : absl::StrCat("dimension ", split.dimension);
    if (blocks == 0)
      return absl::InvalidArgumentError(
          absl::StrCat("its split cuts ", of_part, ", which is empty: leave that part out"));
    return absl::InvalidArgumentError(absl::StrCat(
        "its split cuts ", of_part, " (", parts[p], ") by multiples of ", split.multiple,
        ", which is ", blocks, blocks == 1 ? " block" : " blocks", " for ", tensor_ranks,
        " tensor ranks: use at most ", blocks, blocks == 1 ? " tensor rank" : " tensor ranks"));
  }
  return absl::OkStatus();
}

std::vector<int64_t> BlockShape(std::span<const int64_t> whole_shape, const Split& split, int rank,
                                int ranks) {
  std::vector<int64_t> shape(whole_shape.begin(), whole_shape.end());
  int64_t& size = shape[split.dimension];
  int64_t own = 0;
  for (const Range& range : RangesOf(size, split, rank, ranks)) own += range.end - range.begin;
  size = own;
  return shape;
}

std::vector<BlockRun> RunsOf(std::span<const int64_t> whole_shape, const Split& split, int rank,
                             int ranks, int64_t begin, int64_t end) {
  const Around around(whole_shape, split);
  const std::vector<Range> ranges = RangesOf(around.size, split, rank, ranks);
  const int64_t size = ranges.back().local + ranges.back().end - ranges.back().begin;
  std::vector<BlockRun> runs;
  if (size == 0) return runs;
  const int64_t last = Elements(whole_shape) / around.size * size;
  end = std::min(end, last);
  const int64_t of_outer = size * around.inner;
  for (int64_t outer = begin / of_outer; outer * of_outer < end; ++outer) {
    for (const Range& range : ranges) {
      const int64_t local = (outer * size + range.local) * around.inner;
      const int64_t from = std::max(begin, local),
                    to = std::min(end, local + (range.end - range.begin) * around.inner);
      if (from >= to) continue;
      const int64_t whole = (outer * around.size + range.begin) * around.inner + from - local;
      if (!runs.empty() && runs.back().whole + runs.back().count == whole) {
        runs.back().count += to - from;
      } else {
        runs.push_back({.whole = whole, .local = from, .count = to - from});
      }
    }
  }
  return runs;
}

std::vector<RunOfRank> RunsOfWhole(std::span<const int64_t> whole_shape, const Split& split,
                                   int ranks, int64_t begin, int64_t end) {
  const Around around(whole_shape, split);
  std::vector<Range> all;
  std::vector<int64_t> sizes;  // by rank
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t& size = sizes.emplace_back(0);
    for (const Range& range : RangesOf(around.size, split, rank, ranks)) {
      all.push_back(range);
      size += range.end - range.begin;
    }
  }
  std::sort(all.begin(), all.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::vector<RunOfRank> runs;
  const int64_t of_outer = around.size * around.inner;
  for (int64_t outer = begin / of_outer; outer * of_outer < end; ++outer) {
    for (const Range& range : all) {
      const int64_t whole = (outer * around.size + range.begin) * around.inner;
      const int64_t from = std::max(begin, whole),
                    to = std::min(end, whole + (range.end - range.begin) * around.inner);
      if (from >= to) continue;
      const int64_t local = (outer * sizes[range.rank] + range.local) * around.inner + from - whole;
      runs.push_back(
          {.rank = range.rank, .run = {.whole = from, .local = local, .count = to - from}});
    }
  }
  return runs;
}

absl::Status ForEachSlice(const ModelSpec& model, ParameterId parameter, int64_t begin, int64_t end,
                          ShowSlice show) {
  const std::optional<Block>& block = model[parameter].block;
  return ForEachSliceOf(model, parameter, block ? block->rank : 0, begin, end, show);
}

absl::Status ForEachSliceOf(const ModelSpec& model, ParameterId parameter, int tensor_rank,
                            int64_t begin, int64_t end, ShowSlice show) {
  const ParameterSpec& of = model[parameter];
  if (!of.block) return show(sharding::SliceOf(model, parameter, begin, end), 0);
  const Block& block = *of.block;
  for (const BlockRun& run :
       RunsOf(block.whole_shape, *of.split, tensor_rank, block.ranks, begin, end)) {
    EBB_RETURN_IF_ERROR(show({.parameter = parameter,
                              .name = of.name,
                              .shape = block.whole_shape,
                              .begin = run.whole,
                              .end = run.whole + run.count},
                             run.local - begin));
  }
  return absl::OkStatus();
}

void TakeOfWhole(const ParameterSpec& parameter, int64_t begin, std::span<const float> values,
                 int64_t first, std::span<float> own) {
  const int64_t end = begin + std::ssize(values);
  std::vector<RunOfRank> runs = {{.run = {.whole = begin, .local = begin, .count = end - begin}}};
  const int rank = parameter.block ? parameter.block->rank : 0;
  if (parameter.block) {
    const Block& block = *parameter.block;
    runs = RunsOfWhole(block.whole_shape, *parameter.split, block.ranks, begin, end);
  }
  for (const auto& [of, run] : runs) {
    const int64_t at = run.local - first;  // in `own`
    const int64_t from = std::max<int64_t>(at, 0),
                  to = std::min<int64_t>(at + run.count, std::ssize(own));
    if (of == rank && from < to)
      std::copy_n(values.begin() + (run.whole - begin) + (from - at), to - from,
                  own.begin() + from);
  }
}

absl::StatusOr<ModelSpec> WithBlocks(ModelSpec model, int rank, int ranks) {
  if (ranks == 1)
    for (ParameterSpec& parameter : model.parameters) parameter.sums_gradient = false;
  if (ranks == 1 || !model.has_splits()) return model;
  for (ParameterSpec& parameter : model.parameters) {
    const std::string label = absl::StrCat("parameter '", parameter.name, "': ");
    if (parameter.block) continue;  // as it was made before
    if (!parameter.split) {
      if (parameter.over_tensor == OverTensor::kLocal)
        return absl::InvalidArgumentError(
            absl::StrCat(label,
                         "over_tensor is kLocal beside parameters with a split; give it "
                         "its whole shape and a split, too"));
      parameter.over_tensor = OverTensor::kWhole;
      continue;
    }
    if (const absl::Status split = CheckSplit(parameter, ranks); !split.ok())
      return absl::InvalidArgumentError(absl::StrCat(label, split.message()));
    Block block{.rank = rank, .ranks = ranks, .whole_shape = parameter.shape};
    for (int other = 0; other < ranks; ++other) {
      const std::vector<int64_t> shape =
          BlockShape(block.whole_shape, *parameter.split, other, ranks);
      if (other == 0 || Elements(shape) > Elements(parameter.shape)) parameter.shape = shape;
    }
    block.shape = BlockShape(block.whole_shape, *parameter.split, rank, ranks);
    parameter.block = std::move(block);
    parameter.over_tensor = OverTensor::kLocal;
  }
  return model;
}

}  // namespace ebb
