#include "ebb/runtime/checkpoint/stored_values.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/checkpoint/slice_name.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/copy.h"
#include "ebb/sharding/model.h"

namespace ebb {
namespace {

constexpr size_t kDigits = 16;

std::string Described(const std::string& of, const std::string& parameter) {
  return absl::StrCat(of, " of '", parameter, "'");
}

}  // namespace

std::string StoredValues::PathOf(int rank) const {
  return absl::StrCat(folder_, "/", RankFileName(rank, ranks_));
}

absl::StatusOr<StoredValues> StoredValues::Open(const std::string& checkpoint,
                                                const Manifest& manifest, int rank) {
  StoredValues values;
  values.folder_ = checkpoint;
  values.ranks_ = static_cast<int>(manifest.files.size());
  for (int file = 0; file < values.ranks_; ++file)
    EBB_RETURN_IF_ERROR(values.AddFile(file, file == rank));
  for (auto& [key, pieces] : values.pieces_) {
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  }
  EBB_RETURN_IF_ERROR(values.CheckCoverage(manifest));
  return values;
}

absl::Status StoredValues::AddFile(int rank, bool own) {
  const std::string path = PathOf(rank);
  EBB_ASSIGN_OR_RETURN(const FileHandle file, OpenToRead(path));
  EBB_ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(file.get(), path));
  for (const StoredTensor& tensor : header.tensors) {
    const auto bad = [&](std::string_view what) {
      return absl::DataLossError(
          absl::StrCat("tensor '", tensor.name, "' of '", path, "' ", std::string(what)));
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
    pieces_[{slice->of, slice->parameter}].push_back({.rank = rank,
                                                      .begin = slice->begin,
                                                      .end = slice->end,
                                                      .at = header.data_begin + tensor.begin,
                                                      .dtype = *dtype,
                                                      .sums = std::move(sums->second)});
    header.metadata.erase(sums);
  }
  for (const auto& [name, text] : header.metadata) {
    if (own && !absl::Base64Unescape(text, &of_this_rank_[name]))
      return absl::DataLossError(
          absl::StrCat("metadata '", name, "' of '", path, "' is not in base64"));
  }
  return absl::OkStatus();
}

absl::Status StoredValues::CheckCoverage(const Manifest& manifest) const {
  const auto check = [&](const std::string& of,
                         const Manifest::Parameter& parameter) -> absl::Status {
    const auto lacks = [&](int64_t element) {
      return absl::DataLossError(absl::StrCat("the checkpoint '", folder_,
                                              "' lacks, or has twice, element ", element, " of ",
                                              Described(of, parameter.name)));
    };
    const auto found = pieces_.find({of, parameter.name});
    if (found == pieces_.end()) return lacks(0);
    int64_t next = 0;
    for (const Piece& piece : found->second) {
      if (piece.begin != next) return lacks(std::min(next, piece.begin));
      next = piece.end;
    }
    return next == Elements(parameter.shape) ? absl::OkStatus() : lacks(next);
  };
  size_t checked = 0;
  for (const Manifest::Parameter& parameter : manifest.parameters) {
    EBB_RETURN_IF_ERROR(
        check(std::string(parameter.trainable ? kMasterClass : kParameterClass), parameter));
    for (const std::string& state : parameter.states) EBB_RETURN_IF_ERROR(check(state, parameter));
    checked += 1 + parameter.states.size();
  }
  if (checked == pieces_.size()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("the checkpoint '", folder_, "' has values of ", pieces_.size(),
                   " parameters and states, but its manifest has ", checked));
}

bool StoredValues::Has(const std::string& of, const std::string& parameter) const {
  return pieces_.contains({of, parameter});
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
  values_ = {};
  expected_.clear();
  taken_ = 0;
  for (const Interval& interval : intervals) {
    const auto found = pieces_.find({interval.of, interval.parameter});
    if (found == pieces_.end()) continue;
    for (const Piece& piece : found->second) {
      const int64_t begin = std::max(interval.begin, piece.begin),
                    end = std::min(interval.end, piece.end);
      if (begin >= end) continue;
      const auto [file, added] =
          file_of_rank.emplace(piece.rank, static_cast<int>(file_of_rank.size()));
      if (added) paths.push_back(PathOf(piece.rank));
      const int64_t per_block = kCheckedBlock / SizeOf(piece.dtype);
      for (int64_t number = (begin - piece.begin) / per_block;
           number * per_block < end - piece.begin; ++number) {
        const Block block{&piece, number};
        if (!expected_.empty() && expected_.back() == block) continue;
        expected_.push_back(block);
        ranges.push_back(
            {.file = file->second, .at = piece.at + block.first(), .bytes = block.bytes()});
      }
    }
  }
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
  const char* const digits = piece.sums.data() + static_cast<size_t>(block.number) * kDigits;
  uint64_t sum = 0;
  const auto [end, error] = std::from_chars(digits, digits + kDigits, sum, 16);
  if (error == std::errc() && end == digits + kDigits && found == sum) return absl::OkStatus();
  const int64_t first = piece.at + block.first();
  return absl::DataLossError(
      absl::StrCat("bytes ", first, " to ", first + block.bytes(), " of '", PathOf(piece.rank),
                   "' have changed since they were saved (their checksum differs)"));
}

absl::Status StoredValues::Read(const std::string& of, const std::string& parameter, int64_t begin,
                                std::span<float> values) {
  const auto found = pieces_.find({of, parameter});
  if (found == pieces_.end())
    return absl::NotFoundError(
        absl::StrCat("the checkpoint '", folder_, "' has no ", Described(of, parameter)));
  const std::vector<Piece>& pieces = found->second;
  auto piece = std::upper_bound(pieces.begin(), pieces.end(), begin,
                                [](int64_t at, const Piece& p) { return at < p.end; });
  ThreadTeam caller_only(1);
  while (!values.empty()) {
    if (piece == pieces.end())
      return absl::InvalidArgumentError(
          absl::StrCat("values beyond the end of ", Described(of, parameter)));
    const int64_t size = SizeOf(piece->dtype), per_block = kCheckedBlock / size;
    const Block block{&*piece, (begin - piece->begin) / per_block};
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
    if (begin == piece->end) ++piece;
  }
  return absl::OkStatus();
}

}  // namespace ebb
