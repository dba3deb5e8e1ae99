#include "ebb/runtime/checkpoint/stored_values.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ebb/optim/block_codes.h"
#include "ebb/optim/cast.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/device/cpu/copy.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/split.h"

namespace ebb {
namespace {

constexpr size_t kDigits = 16;

std::pair<std::string, std::string> ScalesOf(const std::pair<std::string, std::string>& key) {
  return {absl::StrCat(key.first, std::string(kScalesSuffix)), key.second};
}

std::string Described(const std::string& of, const std::string& parameter) {
  return absl::StrCat(of, " of '", parameter, "'");
}

}  // namespace

StoredValues::StoredValues(std::string checkpoint, Manifest manifest, int near)
    : folder_(std::move(checkpoint)), files_(std::move(manifest.files)) {
  near_ = std::clamp(near, 0, static_cast<int>(files_.size()) - 1);
  for (const Manifest::Parameter& parameter : manifest.parameters)
    AddParameter(parameter, manifest.state_encodings);
}

void StoredValues::AddParameter(const Manifest::Parameter& parameter,
                                const std::map<std::string, std::string>& encodings) {
  const auto add = [&](const std::string& name, int64_t elements) {
    AddArray({std::string(parameter.trainable ? kMasterClass : kParameterClass), name}, elements,
             {});
    for (const std::string& state : parameter.states) AddArray({state, name}, elements, encodings);
  };
  if (parameter.blocks == 1) return add(parameter.name, Elements(parameter.shape));
  Cut& cut =
      cuts_[parameter.name] = {.shape = parameter.shape, .split = parameter.split, .names = {}};
  for (int rank = 0; rank < parameter.blocks; ++rank) {
    cut.names.push_back(BlockName(parameter.name, rank, parameter.blocks));
    add(cut.names.back(),
        Elements(BlockShape(parameter.shape, parameter.split, rank, parameter.blocks)));
  }
}

void StoredValues::AddArray(const Key& key, int64_t elements,
                            const std::map<std::string, std::string>& encodings) {
  Array& array = arrays_[key];
  array.elements = elements;
  const auto encoding = encodings.find(key.first);
  if (encoding == encodings.end()) return;
  array.encoding = encoding->second == Name(kDynamic8) ? kDynamic8 : kDynamicUnsigned8;
  arrays_[ScalesOf(key)].elements =
      (array.elements + array.encoding.block - 1) / array.encoding.block;
}

std::string StoredValues::NameOfBlock(const ParameterSpec& parameter) const {
  const auto cut = cuts_.find(parameter.name);
  if (cut == cuts_.end() || !parameter.block || *parameter.split != cut->second.split ||
      parameter.block->ranks != static_cast<int>(cut->second.names.size()))
    return "";
  return cut->second.names[parameter.block->rank];
}

std::string StoredValues::PathOf(int rank) const {
  return absl::StrCat(folder_, "/", RankFileName(rank, static_cast<int>(files_.size())));
}

absl::Status StoredValues::AddFile(int rank) {
  if (read_.contains(rank)) return absl::OkStatus();
  const std::string path = PathOf(rank);
  EBB_ASSIGN_OR_RETURN(RankFileHeader read, ReadRankFileHeader(path));
  EBB_RETURN_IF_ERROR(CheckEntry(read.entry, files_[rank], path));
  for (const StoredTensor& tensor : read.header.tensors)
    EBB_RETURN_IF_ERROR(AddPiece(tensor, read.header, rank));
  read_[rank] = std::move(read.header.metadata);
  return absl::OkStatus();
}

absl::Status StoredValues::AddPiece(const StoredTensor& tensor, SafetensorsHeader& header,
                                    int rank) {
  const auto bad = [&](std::string_view what) {
    return absl::DataLossError(
        absl::StrCat("tensor '", tensor.name, "' of '", PathOf(rank), "' ", std::string(what)));
  };
  const std::optional<SliceName> slice = ParseSliceName(tensor.name);
  const std::optional<DType> dtype = DTypeOfSafetensors(tensor.dtype);
  if (!slice || !dtype) return bad("is not a slice of a parameter");
  if (tensor.bytes() % SizeOf(*dtype) != 0 ||
      tensor.bytes() / SizeOf(*dtype) != slice->end - slice->begin)
    return bad("has another size than its name says");
  const auto sums = header.metadata.find(tensor.name);
  if (sums == header.metadata.end() ||
      sums->second.size() != static_cast<size_t>(CheckedBlocks(tensor.bytes())) * kDigits)
    return bad("has no checksums");
  const auto array = arrays_.find({slice->of, slice->parameter});
  if (array == arrays_.end() || slice->end > array->second.elements)
    return bad("is not of the parameters and states in the manifest");
  const bool is_state = slice->of != kMasterClass && slice->of != kParameterClass;
  const bool is_scale = slice->of.ends_with(kScalesSuffix);
  if (is_scale && *dtype != DType::kFloat32) return bad("has scales that are not F32");
  if (is_state && *dtype == DType::kInt8 && array->second.encoding.block == 0)
    return bad("has codes, but the manifest says no encoding of them");
  const int64_t block = array->second.encoding.block;
  if (*dtype == DType::kInt8 && block > 0 && slice->begin % block != 0)
    return bad("begins within a block");
  std::map<int64_t, Piece>& pieces = array->second.pieces;
  const auto next = pieces.lower_bound(slice->begin);
  if ((next != pieces.end() && next->first < slice->end) ||
      (next != pieces.begin() && std::prev(next)->second.end > slice->begin))
    return bad("has elements that another slice has, too");
  pieces.emplace_hint(next, slice->begin,
                      Piece{.rank = rank,
                            .begin = slice->begin,
                            .end = slice->end,
                            .at = header.data_begin + tensor.begin,
                            .dtype = *dtype,
                            .sums = std::move(sums->second)});
  header.metadata.erase(sums);
  return absl::OkStatus();
}

absl::Status StoredValues::ReadAllHeaders() {
  for (int rank = 0; rank < static_cast<int>(files_.size()); ++rank)
    EBB_RETURN_IF_ERROR(AddFile(rank));
  const auto check = [&](const Key& key, int64_t begin, int64_t end) -> absl::Status {
    while (begin < end) {
      EBB_ASSIGN_OR_RETURN(const Piece* const piece, PieceAt(key, begin));
      begin = piece->end;
    }
    return absl::OkStatus();
  };
  for (const auto& [key, array] : arrays_) {
    if (key.first.ends_with(kScalesSuffix)) continue;
    EBB_RETURN_IF_ERROR(check(key, 0, array.elements));
    const int64_t block = array.encoding.block;
    for (const auto& [begin, piece] : array.pieces) {
      if (array.has_codes(piece))
        EBB_RETURN_IF_ERROR(check(ScalesOf(key), begin / block, (piece.end + block - 1) / block));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, std::string>> StoredValues::OfRank(int rank) {
  EBB_RETURN_IF_ERROR(AddFile(rank));
  std::map<std::string, std::string> values;
  for (const auto& [name, text] : read_[rank]) {
    if (!absl::Base64Unescape(text, &values[name]))
      return absl::DataLossError(
          absl::StrCat("metadata '", name, "' of '", PathOf(rank), "' is not in base64"));
  }
  return values;
}

absl::StatusOr<const StoredValues::Piece*> StoredValues::PieceAt(const Key& key, int64_t element) {
  const Array& array = arrays_.at(key);
  while (true) {
    const auto after = array.pieces.upper_bound(element);
    if (after != array.pieces.begin() && std::prev(after)->second.end > element) {
      const Piece& piece = std::prev(after)->second;
      near_ = piece.rank;
      return &piece;
    }
    const int file = NextFile(array, element);
    if (file < 0)
      return absl::DataLossError(absl::StrCat("the checkpoint '", folder_, "' lacks element ",
                                              element, " of ", Described(key.first, key.second)));
    EBB_RETURN_IF_ERROR(AddFile(file));
  }
}

// A rank usually has elements before those of the ranks after it. Every order leads to the piece;
// this one reads few headers.
int StoredValues::NextFile(const Array& array, int64_t element) const {
  const int ranks = static_cast<int>(files_.size());
  int low = -1, high = ranks;  // the piece is between the files of these two
  for (const auto& [begin, piece] : array.pieces) {
    if (piece.end <= element) low = std::max(low, piece.rank);
    if (begin > element) high = std::min(high, piece.rank);
  }
  const auto unread = [&](int rank) { return rank > low && rank < high && !read_.contains(rank); };
  const int start = low >= 0 ? low : std::min(high, near_);
  for (int distance = 0; distance < ranks; ++distance) {
    if (unread(start + distance)) return start + distance;
    if (unread(start - distance)) return start - distance;
  }
  for (int rank = 0; rank < ranks; ++rank)
    if (!read_.contains(rank)) return rank;
  return -1;
}

absl::Status StoredValues::Expect(std::span<const Interval> intervals, IoBackend backend,
                                  std::span<std::byte> memory) {
  // The most files that are read ahead, because each of them is open.
  constexpr size_t kFilesMax = 128;
  std::vector<ReadAhead::Range> ranges;
  std::map<int, int> file_of_rank;
  std::vector<std::string> paths;
  ahead_.reset();
  block_ = {};  // its values are in the old reader's memory
  of_scales_ = nullptr;
  values_ = {};
  expected_.clear();
  taken_ = 0;
  const Piece* of_scales = nullptr;
  const auto expect = [&](const auto& expect_scales, const Key& key, int64_t first,
                          int64_t last) -> absl::Status {
    const auto found = arrays_.find(key);
    if (found == arrays_.end()) return absl::OkStatus();
    const int64_t block_elements = found->second.encoding.block;
    for (int64_t at = first; at < last;) {
      EBB_ASSIGN_OR_RETURN(const Piece* const piece, PieceAt(key, at));
      const int64_t begin = at, end = std::min(last, piece->end);
      at = end;
      if (found->second.has_codes(*piece) && std::exchange(of_scales, piece) != piece) {
        EBB_RETURN_IF_ERROR(expect_scales(expect_scales, ScalesOf(key),
                                          piece->begin / block_elements,
                                          (piece->end + block_elements - 1) / block_elements));
      }
      const auto [file, added] =
          file_of_rank.emplace(piece->rank, static_cast<int>(file_of_rank.size()));
      if (added) paths.push_back(PathOf(piece->rank));
      const int64_t per_block = kCheckedBlock / SizeOf(piece->dtype);
      for (int64_t number = (begin - piece->begin) / per_block;
           number * per_block < end - piece->begin; ++number) {
        const Block block{piece, number};
        if (!expected_.empty() && expected_.back() == block) continue;
        expected_.push_back(block);
        ranges.push_back(
            {.file = file->second, .at = piece->at + block.first(), .bytes = block.bytes()});
      }
    }
    return absl::OkStatus();
  };
  for (const Interval& interval : intervals)
    EBB_RETURN_IF_ERROR(
        expect(expect, {interval.of, interval.parameter}, interval.begin, interval.end));
  if (ranges.empty() || paths.size() > kFilesMax) {
    expected_.clear();
    return absl::OkStatus();
  }
  EBB_ASSIGN_OR_RETURN(ahead_, ReadAhead::Open(paths, std::move(ranges), backend, memory));
  return absl::OkStatus();
}

absl::Status StoredValues::Fetch(const Block& block) {
  block_ = {};
  if (taken_ < expected_.size() && expected_[taken_] == block) {
    ++taken_;
    EBB_ASSIGN_OR_RETURN(values_, ahead_->Next());
  } else {
    const int rank = block.piece->rank;
    const std::string path = PathOf(rank);
    if (open_rank_ != rank) {
      open_rank_ = -1;
      EBB_ASSIGN_OR_RETURN(file_, OpenToRead(path));
      open_rank_ = rank;
    }
    unexpected_.resize(static_cast<size_t>(block.bytes()));
    EBB_RETURN_IF_ERROR(ReadAt(file_.get(), path, block.piece->at + block.first(), unexpected_));
    values_ = unexpected_;
  }
  bytes_read_ += block.bytes();
  return absl::OkStatus();
}

// Goes by the checksum's blocks, so that the copied block is in the cache.
absl::Status StoredValues::Take(const Block& block, int64_t begin, int64_t end,
                                absl::FunctionRef<void(int64_t begin, int64_t end)> show) {
  if (block_ == block) {
    show(begin, end);
    return absl::OkStatus();
  }
  EBB_RETURN_IF_ERROR(Fetch(block));
  for (int64_t at = 0; at < block.bytes(); at += optim::kChecksumBlock) {
    const int64_t next = std::min(at + optim::kChecksumBlock, block.bytes());
    sum_.Append(values_.subspan(static_cast<size_t>(at), static_cast<size_t>(next - at)));
    if (std::max(at, begin) < std::min(next, end)) show(std::max(at, begin), std::min(next, end));
  }
  EBB_RETURN_IF_ERROR(Check(block, sum_.Take()));
  block_ = block;
  return absl::OkStatus();
}

absl::Status StoredValues::Check(const Block& block, uint64_t found) const {
  const Piece& piece = *block.piece;
  const size_t digits = static_cast<size_t>(block.number) * kDigits;
  if (ParseChecksum(std::string_view(piece.sums).substr(digits, kDigits)) == found)
    return absl::OkStatus();
  const int64_t first = piece.at + block.first();
  return absl::DataLossError(
      absl::StrCat("bytes ", first, " to ", first + block.bytes(), " of '", PathOf(piece.rank),
                   "' have changed since they were saved (their checksum differs)"));
}

absl::Status StoredValues::ReadScales(const Key& key, const Array& array, const Piece& piece) {
  if (of_scales_ == &piece) return absl::OkStatus();
  of_scales_ = nullptr;
  const int64_t block = array.encoding.block, first = piece.begin / block;
  scales_.resize(static_cast<size_t>((piece.end + block - 1) / block - first));
  const auto [of, parameter] = ScalesOf(key);
  EBB_RETURN_IF_ERROR(Read(of, parameter, first, scales_));
  of_scales_ = &piece;
  return absl::OkStatus();
}

absl::Status StoredValues::ReadCodes(const Key& key, const Piece& piece, int64_t begin,
                                     std::span<float> values) {
  const Array& array = arrays_.at(key);
  EBB_RETURN_IF_ERROR(ReadScales(key, array, piece));
  const int64_t at = begin - piece.begin, first = at / array.encoding.block * array.encoding.block,
                end = at + std::ssize(values);
  codes_.resize(static_cast<size_t>(end - first));
  for (int64_t next = first; next < end;) {
    const Block block{&piece, next / kCheckedBlock};
    const int64_t in_block = next - block.first(),
                  last = std::min(end - block.first(), block.bytes());
    std::byte* const to = codes_.data() + (next - first);
    EBB_RETURN_IF_ERROR(Take(block, in_block, last, [&](int64_t from, int64_t until) {
      std::copy(values_.begin() + from, values_.begin() + until, to + (from - in_block));
    }));
    next = block.first() + last;
  }
  decoded_.resize(codes_.size());
  ThreadTeam caller_only(1);
  optim::Decode(caller_only,
                {.codes = codes_.data(),
                 .scales = scales_.data() + first / array.encoding.block,
                 .encoding = array.encoding},
                decoded_.data(), std::ssize(decoded_));
  std::copy(decoded_.begin() + (at - first), decoded_.end(), values.begin());
  return absl::OkStatus();
}

// The elements of a block in an interval of the whole lie together in the block.
absl::Status StoredValues::ReadBlocks(const std::string& of, const Cut& cut, int64_t begin,
                                      std::span<float> values) {
  const int64_t end = begin + std::ssize(values);
  if (begin < 0 || end > Elements(cut.shape))
    return absl::InvalidArgumentError(absl::StrCat("values beyond the end of ", of));
  const auto ranks = static_cast<int>(cut.names.size());
  std::vector<RunOfRank> runs = RunsOfWhole(cut.shape, cut.split, ranks, begin, end);
  std::stable_sort(runs.begin(), runs.end(),
                   [](const RunOfRank& a, const RunOfRank& b) { return a.rank < b.rank; });
  for (auto first = runs.begin(); first != runs.end();) {
    const auto last = std::find_if(first, runs.end(),
                                   [&](const RunOfRank& run) { return run.rank != first->rank; });
    const int64_t low = first->run.local,
                  high = std::prev(last)->run.local + std::prev(last)->run.count;
    of_block_.resize(static_cast<size_t>(high - low));
    EBB_RETURN_IF_ERROR(Read(of, cut.names[first->rank], low, of_block_));
    for (; first != last; ++first)
      std::copy_n(of_block_.begin() + (first->run.local - low), first->run.count,
                  values.begin() + (first->run.whole - begin));
  }
  return absl::OkStatus();
}

absl::Status StoredValues::Read(const std::string& of, const std::string& parameter, int64_t begin,
                                std::span<float> values) {
  if (const auto cut = cuts_.find(parameter); cut != cuts_.end())
    return ReadBlocks(of, cut->second, begin, values);
  const Key key(of, parameter);
  const auto found = arrays_.find(key);
  if (found == arrays_.end())
    return absl::NotFoundError(
        absl::StrCat("the checkpoint '", folder_, "' has no ", Described(of, parameter)));
  if (begin < 0 || std::ssize(values) > found->second.elements - begin)
    return absl::InvalidArgumentError(
        absl::StrCat("values beyond the end of ", Described(of, parameter)));
  ThreadTeam caller_only(1);
  while (!values.empty()) {
    EBB_ASSIGN_OR_RETURN(const Piece* const piece, PieceAt(key, begin));
    if (found->second.has_codes(*piece)) {
      const int64_t count = std::min(std::ssize(values), piece->end - begin);
      EBB_RETURN_IF_ERROR(ReadCodes(key, *piece, begin, values.first(static_cast<size_t>(count))));
      values = values.subspan(static_cast<size_t>(count));
      begin += count;
      continue;
    }
    const int64_t size = SizeOf(piece->dtype), per_block = kCheckedBlock / size;
    const Block block{piece, (begin - piece->begin) / per_block};
    const int64_t first = (begin - piece->begin - block.number * per_block) * size;
    const int64_t count = std::min(std::ssize(values), (block.bytes() - first) / size);
    const auto show = [&](int64_t from, int64_t to) {
      float* const at = values.data() + (from - first) / size;
      if (piece->dtype == DType::kFloat32) {
        // Bypasses the caches, because most loaded bytes are not read again soon.
        CopyBytes(caller_only, at, values_.data() + from, to - from, ReadAhead::kMemoryBytes);
      } else {
        optim::Cast(caller_only, values_.data() + from, piece->dtype, at, DType::kFloat32,
                    (to - from) / size, optim::Rounding::kNearest);
      }
    };
    EBB_RETURN_IF_ERROR(Take(block, first, first + count * size, show));
    values = values.subspan(static_cast<size_t>(count));
    begin += count;
  }
  return absl::OkStatus();
}

}  // namespace ebb
