#include "ebb/runtime/checkpoint/rank_file.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/optim/block_codes.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"

namespace ebb {
namespace {

constexpr size_t kSumDigits = 16;

std::optional<int64_t> Number(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

}  // namespace

bool MayBeParameter(std::string_view name) {
  return config::IsUtf8(name) && !name.empty();
}

bool MayBeState(std::string_view name) {
  return MayBeParameter(name) && name.find('/') == std::string_view::npos && name != kMasterClass &&
         name != kParameterClass && !name.ends_with(kScalesSuffix);
}

std::string NameOf(const SliceName& slice) {
  return absl::StrCat(slice.of, "/", slice.parameter, "@", slice.begin, ":", slice.end);
}

std::string BlockName(std::string_view parameter, int rank, int ranks) {
  return absl::StrCat(std::string(parameter), "@", rank, "of", ranks);
}

std::optional<SliceName> ParseSliceName(std::string_view text) {
  const size_t slash = text.find('/'), at = text.rfind('@');
  if (slash == std::string_view::npos || slash == 0 || at == std::string_view::npos ||
      at <= slash + 1)
    return std::nullopt;
  const std::string_view interval = text.substr(at + 1);
  const size_t colon = interval.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::optional<int64_t> begin = Number(interval.substr(0, colon)),
                               end = Number(interval.substr(colon + 1));
  if (!begin || !end || *begin >= *end) return std::nullopt;
  return SliceName{.of = std::string(text.substr(0, slash)),
                   .parameter = std::string(text.substr(slash + 1, at - slash - 1)),
                   .begin = *begin,
                   .end = *end};
}

std::string RankFileName(int rank, int ranks) {
  return absl::StrFormat("rank-%05d-of-%05d.safetensors", rank, ranks);
}

absl::StatusOr<RankFileHeader> ReadRankFileHeader(const std::string& path) {
  EBB_ASSIGN_OR_RETURN(const FileHandle file, OpenToRead(path));
  EBB_ASSIGN_OR_RETURN(const int64_t bytes, BytesOfRegularFile(file.get(), path));
  RankFileHeader read = {.entry = {.bytes = bytes}};
  EBB_ASSIGN_OR_RETURN(read.header, ReadSafetensorsHeader(file.get(), path, [&](auto prefix) {
                         read.entry.header_checksum = optim::Checksum(prefix);
                       }));
  for (const StoredTensor& tensor : read.header.tensors) {
    const auto sums = read.header.metadata.find(tensor.name);
    const std::string_view text =
        sums == read.header.metadata.end() ? std::string_view() : std::string_view(sums->second);
    read.entry.slice_checksums.push_back(optim::Checksum(std::as_bytes(std::span(text))));
  }
  return read;
}

absl::Status CheckEntry(const Manifest::File& found, const Manifest::File& saved,
                        const std::string& path) {
  if (found.bytes != saved.bytes)
    return absl::DataLossError(
        absl::StrCat("'", path, "' has ", found.bytes, " bytes, but ", saved.bytes, " were saved"));
  const bool has_slices = !saved.slice_checksums.empty();  // an older writer gives none
  if (found.header_checksum != saved.header_checksum ||
      (has_slices && found.slice_checksums != saved.slice_checksums))
    return absl::DataLossError(absl::StrCat(
        "the header of '", path, "' has changed since it was saved (its checksum differs)"));
  return absl::OkStatus();
}

absl::StatusOr<RankFileWriter> RankFileWriter::Create(std::string path,
                                                      const std::vector<Slice>& slices,
                                                      std::map<std::string, std::string> metadata,
                                                      IoBackend backend,
                                                      std::span<std::byte> memory) {
  EBB_ASSIGN_OR_RETURN(StreamedFile file, StreamedFile::Create(std::move(path), backend, memory));
  RankFileWriter writer(std::move(file));
  writer.header_.metadata = std::move(metadata);
  const auto add = [&](const SliceName& name, const Encoding& encoding) {
    const StoredTensor& tensor =
        writer.header_.Add(NameOf(name), encoding.dtype, {name.end - name.begin});
    writer.encodings_.push_back(encoding);
    // Zeros, as long as the checksums that replace them.
    writer.header_.metadata[tensor.name].assign(
        static_cast<size_t>(CheckedBlocks(tensor.bytes())) * kSumDigits, '0');
  };
  for (const Slice& slice : slices) {
    const SliceName& name = slice.name;
    const int64_t block = slice.encoding.block;
    add(name, slice.encoding);
    if (block > 0) {
      add({.of = absl::StrCat(name.of, std::string(kScalesSuffix)),
           .parameter = name.parameter,
           .begin = name.begin / block,
           .end = (name.end + block - 1) / block},
          DType::kFloat32);
    }
  }
  writer.sums_.resize(writer.encodings_.size());
  const int64_t data_begin =
      static_cast<int64_t>(SafetensorsPrefix(writer.header_, kDataAlignment).size());
  const size_t entries = writer.header_.tensors.size() + writer.header_.metadata.size();
  if (data_begin > kSafetensorsHeaderMax || entries > kSafetensorsEntriesMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("'", writer.file_.path(), "' would need a header of ", data_begin,
                     " bytes with ", entries, " entries; the limits are ", kSafetensorsHeaderMax,
                     " and ", kSafetensorsEntriesMax, ": train on more ranks"));
  }
  writer.file_.Expect(data_begin, data_begin + writer.header_.data_bytes());
  return writer;
}

// The codes; the scales are behind the others in scales_.
std::span<const std::byte> RankFileWriter::EncodedAs(const Encoding& encoding,
                                                     std::span<const float> values) {
  if (encoding.block == 0) return BytesAs(encoding.dtype, values, cast_);
  ThreadTeam caller_only(1);
  const size_t before = scales_.size();
  scales_.resize(before + (values.size() + encoding.block - 1) / encoding.block);
  cast_.resize(values.size());
  optim::Encode(caller_only, values.data(),
                {.codes = cast_.data(), .scales = &scales_[before], .encoding = encoding},
                std::ssize(values));
  return cast_;
}

absl::Status RankFileWriter::Append(std::span<const float> values) {
  if (values.empty()) return absl::OkStatus();
  const size_t tensor = tensor_;
  const bool is_left =
      tensor < sums_.size() && std::ssize(values) * encodings_[tensor].code_bytes() <=
                                   header_.tensors[tensor].bytes() - of_tensor_;
  if (!is_left)
    return absl::InternalError(
        absl::StrCat("more data than the tensors of '", file_.path(), "' have"));
  EBB_RETURN_IF_ERROR(AppendBytes(EncodedAs(encodings_[tensor], values)));
  if (tensor_ == tensor || scales_.empty()) return absl::OkStatus();
  const std::vector<float> scales = std::exchange(scales_, {});
  if (std::ssize(scales) * Encoding::kScaleBytes != header_.tensors[tensor_].bytes())
    return absl::InternalError(
        absl::StrCat("a call for '", file_.path(), "' ended within a block of states"));
  return AppendBytes(std::as_bytes(std::span(scales)));
}

// The bytes are one tensor's. They go block by block of the checksum, so that a block is copied
// while it is in the cache.
absl::Status RankFileWriter::AppendBytes(std::span<const std::byte> bytes) {
  const StoredTensor* const tensor = &header_.tensors[tensor_];
  while (!bytes.empty()) {
    const int64_t taken =
        std::min(std::ssize(bytes), optim::kChecksumBlock - of_tensor_ % optim::kChecksumBlock);
    const std::span<const std::byte> block = bytes.first(static_cast<size_t>(taken));
    bytes = bytes.subspan(block.size());
    sum_.Append(block);
    EBB_RETURN_IF_ERROR(file_.Append(block));
    of_tensor_ += taken;
    if (of_tensor_ == tensor->bytes() || of_tensor_ % kCheckedBlock == 0)
      sums_[tensor_] += ChecksumText(sum_.Take());
  }
  if (of_tensor_ == tensor->bytes()) {
    ++tensor_;
    of_tensor_ = 0;
  }
  return absl::OkStatus();
}

absl::Status RankFileWriter::Finish() {
  if (tensor_ != sums_.size())
    return absl::InternalError(
        absl::StrCat("'", file_.path(), "' lacks data of ", sums_.size() - tensor_, " tensors"));
  for (size_t i = 0; i < sums_.size(); ++i)
    header_.metadata[header_.tensors[i].name] = std::move(sums_[i]);
  const std::string prefix = SafetensorsPrefix(header_, kDataAlignment);
  EBB_RETURN_IF_ERROR(file_.WriteAt(0, std::as_bytes(std::span(prefix))));
  return file_.Sync();
}

}  // namespace ebb
